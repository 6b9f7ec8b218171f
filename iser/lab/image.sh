#!/usr/bin/env bash
# Makes the guest's three files, kernel, initrd and disk, in the directory OUT.
#
#   image.sh OUT FILES DOWNLOADS
#
# FILES holds what goes into the guest beside Debian's packages: init, boot, agent.
# DOWNLOADS keeps packages between runs. Nothing is installed on this machine and nothing
# outside the three directories is written. Root is not needed.
set -euo pipefail
export LC_ALL=C PATH=$PATH:/usr/sbin:/sbin
out=$(realpath "$1") files=$(realpath "$2") downloads=$(realpath -m "$3")

guest_packages=(
	linux-image-amd64
	bash coreutils util-linux mount grep sed mawk findutils diffutils procps less ncurses-base
	kmod udev iproute2 ethtool tcpdump busybox-static
	open-iscsi sg3-utils lsscsi fio e2fsprogs xfsprogs
)
# What of the kernel's modules is of use in a guest without hardware.
module_folders=(
	arch block crypto lib net
	drivers/{block,char,infiniband,md,net/virtio_net.ko,net/net_failover.ko,scsi,target,virtio}
	fs/{9p,configfs,ext4,fat,fscache,fuse,jbd2,netfs,nls,overlayfs,xfs}
	fs/{mbcache.ko,libcrc32c.ko}
)
# What the first file system needs before there is one.
boot_modules=(virtio_pci virtio_blk ext4)

step() { printf 'lab: %s\n' "$*" >&2; }
fail() { printf 'lab: %s\n' "$*" >&2; exit 1; }

for program in apt-get apt-cache dpkg-deb make gcc-12 tar xz zstd cpio depmod modprobe mke2fs busybox; do
	command -v "$program" >/dev/null || fail "$program is missing: run .ci/install"
done

work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$downloads/partial" "$work/root" "$work/none/partial"
: >"$work/status"

# ---- packages: resolved as for a machine that has none, so that this one's do not matter

apt() {
	local archives=$1
	shift
	DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
		-o Dir::State::status="$work/status" -o Dir::Cache::archives="$archives" \
		-o APT::Sandbox::User=root -o Debug::NoLocking=1 "$@"
}

step "Debian's packages for the guest"
apt "$work/none" --print-uris install "${guest_packages[@]}" >"$work/uris" ||
	fail "apt knows too little: run apt-get update"
apt "$downloads" --download-only install "${guest_packages[@]}" >/dev/null
mapfile -t debs < <(cut -d' ' -f2 "$work/uris")

kernel_deb='' version=''
for deb in "${debs[@]}"; do
	[[ $deb =~ ^linux-image-([0-9].*)_.*_.*\.deb$ ]] || continue
	kernel_deb=$downloads/$deb version=${BASH_REMATCH[1]}
done
[ -n "$version" ] || fail "no kernel among ${debs[*]}"
package_version=$(dpkg-deb -f "$kernel_deb" Version)
series=$(cut -d. -f1,2 <<<"$version")

root=$work/root
mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
for d in bin sbin lib lib64; do ln -s "usr/$d" "$root/$d"; done
for deb in "${debs[@]}"; do
	[ "$downloads/$deb" != "$kernel_deb" ] || continue
	dpkg-deb --fsys-tarfile "$downloads/$deb" | tar -x -C "$root" --keep-directory-symlink --no-same-owner \
		--exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/info' \
		--exclude='./usr/share/locale' --exclude='./usr/share/icu' --exclude='./usr/lib/python3*'
done
mkdir "$work/kernel"
dpkg-deb -x "$kernel_deb" "$work/kernel"

# ---- the kernel: qemu starts the ELF image inside without unpacking it in emulation

bzimage=$work/kernel/boot/vmlinuz-$version
field() { od -An -t"$2" -j $(($1)) -N"${2#u}" "$bzimage" | tr -d ' '; }
setup=$(field 0x1f1 u1)
start=$(((setup + 1) * 512 + $(field 0x248 u4)))
length=$(($(field 0x24c u4) - 4)) # the last four bytes are the unpacked size
payload() { tail -c +$((start + 1)) "$bzimage" | head -c $length || true; }
case $(payload | head -c 4 | od -An -tx1 | tr -d ' ') in
fd377a58) payload | xz -dc >"$work/vmlinux" ;;
28b52ffd) payload | zstd -dcq >"$work/vmlinux" ;;
*) fail "kernel $version is packed in a way that is not known here" ;;
esac

modules=$root/lib/modules/$version
mkdir -p "$modules/kernel" "$modules/extra"
cp "$work/kernel/lib/modules/$version"/modules.{builtin,builtin.modinfo,order} "$modules/"
for folder in "${module_folders[@]}"; do
	from=$work/kernel/lib/modules/$version/kernel/$folder
	[ -e "$from" ] || continue # one kernel has it, another has it built in
	mkdir -p "$(dirname "$modules/kernel/$folder")"
	cp -r "$from" "$modules/kernel/$folder"
done

# ---- siw, which Debian's kernels lack, from Debian's source of the same version

step "soft-iWARP for kernel $version"
build=$work/build
mkdir -p "$build"
fetch=("linux-headers-$version=$package_version" "linux-source-$series=$package_version")
for part in $(apt-cache show "linux-headers-$version=$package_version" |
	sed -n '/^Depends:/s/[,|]/\n/gp' | sed 's/^Depends://' | awk '{print $1}'); do
	case $part in linux-headers-*-common | linux-kbuild-*) fetch+=("$part=$package_version") ;; esac
done
(cd "$downloads" && apt-get -qq -o APT::Sandbox::User=root download "${fetch[@]}")
for part in "${fetch[@]}"; do
	deb=$(echo "$downloads/${part%%=*}_${package_version//:/%3a}"_*.deb)
	case $part in
	linux-source-*)
		dpkg-deb --fsys-tarfile "$deb" | tar -xOf - "./usr/src/linux-source-$series.tar.xz" |
			tar -xJf - -C "$build" "linux-source-$series/drivers/infiniband/sw/siw"
		;;
	*) dpkg-deb -x "$deb" "$build" ;;
	esac
done
headers=$build/usr/src/linux-headers-$version
sed -i "s|/usr/src/|$build/usr/src/|" "$headers/Makefile" # they do not lie where they expect to
siw=$build/siw
mv "$build/linux-source-$series/drivers/infiniband/sw/siw" "$siw"
cp -r "$siw" "$build/tunable"

# The second module is the first with its compile-time switches as parameters.
tunable=$build/tunable
for name in zcopy_tx try_gso loopback_enabled mpa_crc_required mpa_crc_strict siw_tcp_nagle peer_to_peer; do
	sed -i "s/^const bool $name\>/bool $name/" "$tunable/siw_main.c"
	sed -i "s/^extern const bool $name;/extern bool $name;/" "$tunable/siw.h"
	echo "module_param($name, bool, 0644);" >>"$tunable/siw_main.c"
done
echo 'module_param(mpa_version, byte, 0644);' >>"$tunable/siw_main.c"
# In network byte order: 64 offers a zero-length Read, 128 a zero-length Write, 192 both.
printf '#include <linux/moduleparam.h>\nmodule_param(rtr_type, ushort, 0644);\n' >>"$tunable/siw_cm.c"

for source in "$siw" "$tunable"; do
	make -s -C "$headers" M="$source" CONFIG_RDMA_SIW=m CONFIG_DEBUG_INFO_BTF_MODULES= modules >"$work/make.log" 2>&1 ||
		{ cat "$work/make.log" >&2; fail "siw does not compile"; }
	strip --strip-debug "$source/siw.ko"
done
cp "$siw/siw.ko" "$modules/extra/"
depmod -b "$root" "$version"

# ---- what package scripts would have made, and our own files

step "kernel, initrd and disk"
mkdir -p "$root"/{proc,sys,dev,run,tmp,mnt,root,lab,etc/iscsi,etc/target,var/lib/iscsi,var/target}
cp "$tunable/siw.ko" "$root/lab/siw-tunable.ko"
cp "$files/boot" "$files/agent" "$root/lab/"
chmod 755 "$root/lab/boot" "$root/lab/agent"
cat >"$root/etc/passwd" <<'END'
root:x:0:0:root:/root:/bin/bash
tcpdump:x:100:100::/:/bin/false
nobody:x:65534:65534::/:/bin/false
END
printf '%s\n' root:x:0: tty:x:5: disk:x:6: tcpdump:x:100: nogroup:x:65534: >"$root/etc/group"
printf '127.0.0.1 localhost guest\n10.0.2.2 host\n' >"$root/etc/hosts"
printf 'passwd: files\ngroup: files\nhosts: files\n' >"$root/etc/nsswitch.conf"
ln -sf mawk "$root/usr/bin/awk"
ln -sf /proc/self/mounts "$root/etc/mtab"
ldconfig -r "$root"

initrd=$work/initrd
mkdir -p "$initrd"/{bin,dev,proc,sys,root,modules}
cp "$(command -v busybox)" "$initrd/bin/busybox"
cp "$files/init" "$initrd/init"
chmod 755 "$initrd/init"
for name in "${boot_modules[@]}"; do
	modprobe -d "$root" -S "$version" --show-depends "$name" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
done | awk '!seen[$0]++' | while read -r ko; do
	cp "$ko" "$initrd/modules/"
	basename "$ko" >>"$initrd/modules/order"
done
(cd "$initrd" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/initrd.img"

size=$(($(du -sm --apparent-size "$root" | cut -f1) * 5 / 4 + 256))
mke2fs -q -F -t ext4 -O ^has_journal,^metadata_csum -m 0 -E root_owner=0:0 -d "$root" "$work/disk.img" "${size}M" >/dev/null

mv "$work/vmlinux" "$work/initrd.img" "$work/disk.img" "$out/"
echo "$version" >"$out/kernel-version"
