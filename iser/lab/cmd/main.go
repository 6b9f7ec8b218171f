// Command cmd makes and starts the lab's guest; --help says how.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"

	"github.com/isergate/isergate/iser/lab"
)

const usage = `usage: go run ./iser/lab/cmd build | shell | dir

The lab's guest is a small Linux machine, emulated by QEMU, with the kernel's own iSCSI and
iSER initiator and target. It reaches 127.0.0.1:PORT of this machine as 10.0.2.2:PORT, and
nothing else; what is written in it is gone when it ends.

  build   makes what the guest boots from, unless it is there: downloads 0.3 GB from Debian,
          takes 1 to 7 minutes, needs x86-64 and the packages of .ci/install
  shell   builds if need be, boots a guest and gives its prompt; input that is no terminal is
          a script for bash, which ends at the first command that fails
  dir     prints where the guest's files are, or will be: removing that directory makes the
          next build new
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	switch strings.Join(args, " ") {
	case "build":
		_, err := lab.Build(ctx, os.Stderr)
		return err
	case "dir":
		dir, err := lab.Dir()
		fmt.Println(dir)
		return err
	case "shell":
		return shell(ctx)
	case "help", "-h", "-help", "--help":
		fmt.Print(usage)
		return nil
	default:
		return fmt.Errorf("%q is not what this program does\n%s", strings.Join(args, " "), strings.TrimSpace(usage))
	}
}

// shell gives a person the guest, with the terminal in raw mode: the guest's does the rest.
// Without a terminal it runs what is on standard input.
func shell(ctx context.Context) error {
	if _, err := lab.Build(ctx, os.Stderr); err != nil {
		return err
	}
	saved, err := stty("-g")
	if err != nil {
		return script(ctx, os.Stdin)
	}
	defer func() { _, _ = stty(strings.TrimSpace(saved)) }()
	rows, columns, term := "24", "80", os.Getenv("TERM")
	if term == "" {
		term = "linux"
	}
	if size, err := stty("size"); err == nil {
		_, _ = fmt.Sscan(size, &rows, &columns)
	}
	guest, err := lab.Boot(ctx, lab.Options{CPUs: 2, Terminal: true})
	if err != nil {
		return err
	}
	defer guest.Close()
	_, _ = stty("raw", "-echo")
	_, err = guest.Run(ctx, "stty -F /dev/hvc0 sane rows "+rows+" columns "+columns+`
cat >/root/.bashrc <<'END'
. /lab/lib.sh
export PS1='guest# ' TERM=`+term+`
cat <<'TEXT'
The machine that started this guest is 10.0.2.2: what listens on its 127.0.0.1:3260 is
10.0.2.2:3260 here. To use a gateway there, by iSER:

    rnic; initiator
    iscsiadm -m discovery -t st -p 10.0.2.2:3260 -I iser
    login iser 10.0.2.2:3260 TARGET

By plain iSCSI it is "-I default" and "login tcp", without rnic. For a target that is not to be
discovered: node iser 10.0.2.2:3260 TARGET. More: less /lab/lib.sh. To leave: exit
TEXT
END
setsid -w -c bash -i </dev/hvc0 >/dev/hvc0 2>&1`)
	return err
}

// script runs a script in a guest of its own and prints what it printed.
func script(ctx context.Context, in io.Reader) error {
	text, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	guest, err := lab.Boot(ctx, lab.Options{CPUs: 2})
	if err != nil {
		return err
	}
	defer guest.Close()
	out, err := guest.Run(ctx, string(text))
	fmt.Print(out)
	return err
}

// stty sets or asks the terminal on standard input.
func stty(args ...string) (string, error) {
	cmd := exec.Command("stty", args...)
	cmd.Stdin = os.Stdin
	out, err := cmd.Output()
	return string(out), err
}
