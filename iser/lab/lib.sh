# Functions for scripts in the guest, and for a person at its prompt. They use nothing that
# an ordinary Debian machine has not, but for siw, Debian's kernels being built without it.

case $- in *i*) ;; *) set -euo pipefail ;; esac

# until_true SECONDS COMMAND...: waits until the command succeeds.
until_true() {
	local deadline=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		if [ $SECONDS -ge $deadline ]; then
			echo "in vain: $*" >&2
			return 1
		fi
		sleep 0.2
	done
}

# ---- the software RNIC

# rnic [SWITCH=VALUE...]: puts soft-iWARP on eth0, anew if it is there. With switches it is
# the module that has them: mpa_crc_required, mpa_crc_strict, mpa_version (1, 2),
# peer_to_peer, rtr_type (64 Read, 128 Write, 192 both), try_gso, zcopy_tx, siw_tcp_nagle.
rnic() {
	if [ -d /sys/module/siw ]; then
		rdma link delete siw0 2>/dev/null || true
		rmmod siw
	fi
	modprobe -a ib_core iw_cm rdma_cm libcrc32c
	if [ $# -gt 0 ]; then insmod /lab/siw-tunable.ko "$@"; else modprobe siw; fi
	rdma link add siw0 type siw netdev eth0
}

# ---- the initiator

# initiator: starts open-iscsi's daemon.
initiator() {
	modprobe -a iscsi_tcp ib_iser sd_mod sg
	echo "InitiatorName=${1:-iqn.2004-10.com.example:guest}" >/etc/iscsi/initiatorname.iscsi
	pgrep -x iscsid >/dev/null || iscsid </dev/null >/run/iscsid.log 2>&1
	until_true 30 iscsiadm -m iface
}

# node TRANSPORT PORTAL TARGET [SETTING=VALUE...]: a node record. TRANSPORT is tcp or iser,
# the settings are those of iscsid.conf.
node() {
	local transport=$1 portal=$2 target=$3 setting
	shift 3
	iscsiadm -m node -o new -I "$(interface "$transport")" -p "$portal" -T "$target" >/dev/null
	for setting; do
		iscsiadm -m node -o update -I "$(interface "$transport")" -p "$portal" -T "$target" -n "${setting%%=*}" -v "${setting#*=}"
	done
}

# interface TRANSPORT: what open-iscsi calls it.
interface() { if [ "$1" = tcp ]; then echo default; else echo "$1"; fi; }

# login TRANSPORT PORTAL TARGET: logs in by the node record and prints the disk of LUN 0.
login() {
	timeout 120 iscsiadm -m node -I "$(interface "$1")" -p "$2" -T "$3" --login >/run/login.log 2>&1 || {
		local status=$?
		cat /run/login.log >&2
		return $status
	}
	until_true 60 disk "$1" "$3"
	disk "$1" "$3"
}

# logout TRANSPORT PORTAL TARGET
logout() { timeout 120 iscsiadm -m node -I "$(interface "$1")" -p "$2" -T "$3" --logout >/dev/null; }

# sessions TRANSPORT TARGET: the names of the kernel's sessions, session1 and so on.
sessions() {
	local session host driver
	for session in /sys/class/iscsi_session/session*; do
		[ "$(cat "$session/targetname" 2>/dev/null)" = "$2" ] || continue
		host=$(readlink -f "$session/device/..")
		driver=$(cat "$host"/scsi_host/host*/proc_name)
		case $1:$driver in tcp:iscsi_tcp | iser:iscsi_iser) basename "$session" ;; esac
	done
}

# disk TRANSPORT TARGET [LUN]: the block device that a session brought.
disk() {
	local session device
	for session in $(sessions "$1" "$2"); do
		for device in /sys/class/iscsi_session/"$session"/device/target*/*:"${3:-0}"/block/*; do
			[ -e "$device" ] || continue
			echo "/dev/$(basename "$device")"
			return
		done
	done
	return 1
}

# state TRANSPORT TARGET: LOGGED_IN, FAILED, FREE.
state() { cat "/sys/class/iscsi_session/$(sessions "$1" "$2" | head -1)/state"; }

# ---- LIO, the kernel's target

lio=/sys/kernel/config/target

# lio TARGET MIB [NAME=VALUE...]: a target with a RAM disk of that size as LUN 0, open to
# all, with those login parameters (InitialR2T=No).
lio() {
	modprobe -a configfs target_core_mod iscsi_target_mod target_core_file
	mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
	mkdir -p $lio/iscsi
	local name=${1//[:.]/-} group=$lio/iscsi/$1/tpgt_1 size=$2 setting
	shift 2
	local store=$lio/core/fileio_0/$name
	truncate -s "${size}M" "/dev/shm/$name"
	mkdir -p "$store" "$group"
	echo "fd_dev_name=/dev/shm/$name,fd_dev_size=$((size << 20))" >"$store/control"
	echo 1 >"$store/enable"
	mkdir "$group/lun/lun_0"
	ln -s "$store" "$group/lun/lun_0/disk"
	for setting in authentication=0 generate_node_acls=1 cache_dynamic_acls=1 demo_mode_write_protect=0; do
		echo "${setting#*=}" >"$group/attrib/${setting%%=*}"
	done
	for setting; do echo "${setting#*=}" >"$group/param/${setting%%=*}"; done
	echo 1 >"$group/enable"
}

# lio_chap TARGET INITIATOR USER SECRET [USER SECRET]: from now on the target is open to that
# initiator only, by CHAP, and with a second pair by mutual CHAP.
lio_chap() {
	local group=$lio/iscsi/$1/tpgt_1
	local acl=$group/acls/$2
	mkdir "$acl" "$acl/lun_0"
	ln -s "$group/lun/lun_0" "$acl/lun_0/lun"
	printf %s "$3" >"$acl/auth/userid"
	printf %s "$4" >"$acl/auth/password"
	if [ $# -gt 4 ]; then
		printf %s "$5" >"$acl/auth/userid_mutual"
		printf %s "$6" >"$acl/auth/password_mutual"
	fi
	echo 0 >"$group/attrib/generate_node_acls"
	echo 1 >"$group/attrib/authentication"
}

# lio_portal TRANSPORT PORTAL TARGET. LIO listens by TCP on every portal first; over iWARP
# its iSER listener wants the same TCP port and is refused. So the first one is made in a
# network namespace where it is in nobody's way.
lio_portal() {
	local portal=$lio/iscsi/$3/tpgt_1/np/$2
	if [ "$1" = tcp ]; then
		mkdir "$portal"
		return
	fi
	modprobe ib_isert
	if [ ! -e /run/netns/aside ]; then
		ip netns add aside
		ip -n aside link set lo up
		ip -n aside address add "${2%:*}/32" dev lo
	fi
	nsenter --net=/run/netns/aside mkdir "$portal"
	echo 1 >"$portal/iser"
}
