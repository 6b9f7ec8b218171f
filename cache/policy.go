package cache

import (
	"fmt"
	"strings"
	"time"
)

// Level is a persistence level: where an acknowledged write lives. Levels are
// ordered, weakest first.
type Level uint8

// The persistence levels.
const (
	Memory Level = 1 // the owner's RAM
	Local  Level = 2 // the owner's journal, synced
	Quorum Level = 3 // the journals, synced, of every node of the in-sync set
	Object Level = 4 // the object store, in order
)

var levelNames = map[Level]string{Memory: "memory", Local: "local", Quorum: "quorum", Object: "object"}

// String returns the level's name as used on the command line.
func (l Level) String() string {
	if s, ok := levelNames[l]; ok {
		return s
	}
	return fmt.Sprintf("Level(%d)", uint8(l))
}

// ParseLevel is the inverse of String.
func ParseLevel(s string) (Level, error) {
	for l, name := range levelNames {
		if name == s {
			return l, nil
		}
	}
	return 0, fmt.Errorf("%q is no persistence level: use memory, local, quorum or object", s)
}

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Level) UnmarshalText(b []byte) (err error) { *l, err = ParseLevel(string(b)); return err }

// OnUnmet says what happens while a level that the policy asks for cannot be reached.
type OnUnmet uint8

// What happens while a level cannot be reached.
const (
	Block   OnUnmet = 0 // commands wait, then end with BUSY and are tried again
	Error   OnUnmet = 1 // commands end with an error
	Degrade OnUnmet = 2 // commands are acknowledged at the highest level reached, and that is announced
)

var onUnmetNames = map[OnUnmet]string{Block: "block", Error: "error", Degrade: "degrade"}

// String returns the name as used on the command line.
func (u OnUnmet) String() string {
	if s, ok := onUnmetNames[u]; ok {
		return s
	}
	return fmt.Sprintf("OnUnmet(%d)", uint8(u))
}

// ParseOnUnmet is the inverse of String.
func ParseOnUnmet(s string) (OnUnmet, error) {
	for u, name := range onUnmetNames {
		if name == s {
			return u, nil
		}
	}
	return 0, fmt.Errorf("%q is no on-unmet rule: use block, error or degrade", s)
}

// MarshalText implements encoding.TextMarshaler.
func (u OnUnmet) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *OnUnmet) UnmarshalText(b []byte) (err error) { *u, err = ParseOnUnmet(string(b)); return err }

// Policy is a volume's persistence policy. All that an initiator is told about
// caching is derived from it.
type Policy struct {
	Ack     Level   `json:"ack" yaml:"ack"`     // reached before a plain write is acknowledged
	Flush   Level   `json:"flush" yaml:"flush"` // reached before a flush or a FUA write is acknowledged; >= Ack
	OnUnmet OnUnmet `json:"on_unmet" yaml:"on_unmet"`
}

// DefaultPolicy is that of a one-node gateway.
var DefaultPolicy = Policy{Ack: Local, Flush: Local, OnUnmet: Block}

// Validate reports every fault of the policy for a node with or without a cluster.
func (p Policy) Validate(clustered bool) error {
	var faults []string
	for _, l := range []struct {
		what  string
		level Level
	}{{"ack", p.Ack}, {"flush", p.Flush}} {
		if _, ok := levelNames[l.level]; !ok {
			faults = append(faults, fmt.Sprintf("%s is not a persistence level", l.what))
		}
		if l.level == Quorum && !clustered {
			faults = append(faults, fmt.Sprintf("%s=quorum needs a cluster, and this node has none: use local or object", l.what))
		}
	}
	if p.Flush < p.Ack {
		faults = append(faults, fmt.Sprintf("flush=%s is weaker than ack=%s: a flush may not promise less than a write", p.Flush, p.Ack))
	}
	if _, ok := onUnmetNames[p.OnUnmet]; !ok {
		faults = append(faults, "on-unmet is not block, error or degrade")
	}
	if faults != nil {
		return fmt.Errorf("persistence policy: %s", strings.Join(faults, "; "))
	}
	return nil
}

// Sentence is the contract in plain words.
func (p Policy) Sentence() string {
	where := map[Level]string{
		Memory: "is in this node's memory, and survives nothing but a network interruption",
		Local:  "is synced to this node's journal, and survives a crash or power loss of the node",
		Quorum: "is synced to the journal of every in-sync node, and survives the loss of any minority of nodes",
		Object: "is in the object store, and survives the loss of the whole gateway",
	}
	unmet := map[OnUnmet]string{
		Block:   "While a level cannot be reached, the commands that need it wait.",
		Error:   "While a level cannot be reached, the commands that need it fail, each after it has waited (cache.unmet_after, 10 s by default).",
		Degrade: "While a level cannot be reached, the commands that need it are answered at the level that is reached, and the volume says so; the first has waited before (cache.unmet_after, 10 s by default).",
	}
	s := "A write is acknowledged when it " + where[p.Ack] + "."
	if p.Flush != p.Ack {
		s += " A flush or FUA write returns when the data " + where[p.Flush] + "."
	}
	return s + " " + unmet[p.OnUnmet]
}

// LSN numbers the writes of one volume, from 1, in the order in which they took
// effect.
type LSN uint64

// Watermark is the highest LSN below which every write has reached a level.
type Watermark struct {
	LSN  LSN       `json:"lsn"`
	Time time.Time `json:"time"` // when that LSN reached the level; zero if never
}

// Watermarks of a volume, by level. Acked >= what any initiator was told.
type Watermarks struct {
	Acked  Watermark `json:"acked"`
	Local  Watermark `json:"local"`
	Quorum Watermark `json:"quorum"` // stays zero on a node without a cluster
	Object Watermark `json:"object"`
}

// Effective is the policy in force when an initiator may have switched the write
// cache off.
func (p Policy) Effective(writeThrough bool) Policy {
	if writeThrough {
		p.Ack = p.Flush
	}
	return p
}
