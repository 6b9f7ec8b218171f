package objectstore

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// ConditionalPut says what a store does with a second put of a key under If-None-Match.
type ConditionalPut int

// The answers. Only ConditionalHonoured keeps two writers apart.
const (
	ConditionalUntested    ConditionalPut = 0
	ConditionalHonoured    ConditionalPut = 1 // refused: the first object stays
	ConditionalIgnored     ConditionalPut = 2 // accepted: the second put overwrote the first, or could have
	ConditionalUnsupported ConditionalPut = 3 // the store answers that it cannot do it
)

// String returns one lower-case word.
func (c ConditionalPut) String() string {
	switch c {
	case ConditionalHonoured:
		return "honoured"
	case ConditionalIgnored:
		return "ignored"
	case ConditionalUnsupported:
		return "unsupported"
	}
	return "untested"
}

// Capabilities is what Probe found out.
type Capabilities struct {
	ConditionalPut ConditionalPut
	RangedGet      bool          // ranges within, across and behind the end are answered right
	OrderedList    bool          // listing is ordered, sees what was written, and start-after works
	Delete         bool          // what was written could be removed
	Clock          time.Duration // the store's clock minus ours, roughly
}

// Probe finds out what the store behind b does, with two small objects under
// probe/<random>/ that it removes. b should be unwrapped or wrapped by WithRetry, and not
// opened with Options.SingleWriter, which hides what the store does.
//
// It returns an error that Is ErrNoConditionalPut, and the capabilities, when the
// store does not keep two writers apart: refuse it unless the operator declared a single
// writer (and, if the capabilities say ConditionalUnsupported, probe again once it is opened for
// one: nothing else could be tried). It Is ErrUnsupported and not ErrNoConditionalPut when
// ranged gets or ordered lists do not work: refuse it always. It Is ErrCorrupt when bytes came back changed. Any other error means that the
// store could not be examined now; its Class says why, and the capabilities are incomplete.
func Probe(ctx context.Context, b Bucket) (Capabilities, error) {
	var random [16]byte
	rand.Read(random[:])
	p := prober{b: b, prefix: "probe/" + hex.EncodeToString(random[:]) + "/"}
	p.first = append([]byte("isergate probe, first writer "), random[:]...)
	p.second = append([]byte("isergate probe, other writer "), random[:]...)
	keys := []string{p.prefix + "a", p.prefix + "b"}

	err := p.run(ctx, keys)
	// What an unknown outcome may have left is removed too, unless the store has just shown that it does not answer.
	limit := time.Minute
	if err != nil && !errors.Is(err, ErrNoConditionalPut) {
		limit = 2 * time.Second
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	if derr := b.Delete(cleanup, keys...); derr == nil {
		p.caps.Delete = true
	} else if err == nil || errors.Is(err, ErrNoConditionalPut) {
		err = errors.Join(err, derr)
	}
	if err != nil {
		return p.caps, fmt.Errorf("objectstore: probe of %s: %w", b.URL(), err)
	}
	return p.caps, nil
}

type prober struct {
	b             Bucket
	prefix        string
	first, second []byte
	caps          Capabilities
}

func (p *prober) run(ctx context.Context, keys []string) error {
	putErr := p.puts(ctx, keys[0])
	if putErr != nil && !errors.Is(putErr, ErrNoConditionalPut) {
		return putErr
	}
	if p.caps.ConditionalPut == ConditionalUnsupported {
		return putErr // nothing could be written: nothing more to try
	}
	if err := ignoreExists(p.b.PutIfAbsent(ctx, keys[1], p.second)); err != nil {
		return err
	}
	for _, step := range []func(context.Context, []string) error{p.ranges, p.list, p.clock} {
		if err := thrice(func() error { return step(ctx, keys) }); err != nil {
			return err // a store that is unfit anyhow
		}
	}
	return putErr
}

// thrice repeats a look at the store that found it unfit: one answer may have changed on its way.
func thrice(look func() error) (err error) {
	for range 3 {
		if err = look(); !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
			return err
		}
	}
	return err
}

// puts writes key twice and sees who won.
func (p *prober) puts(ctx context.Context, key string) error {
	err := p.b.PutIfAbsent(ctx, key, p.first)
	switch {
	case errors.Is(err, ErrUnsupported):
		p.caps.ConditionalPut = ConditionalUnsupported
		return fmt.Errorf("%w: %w", ErrNoConditionalPut, err)
	case ignoreExists(err) != nil: // the key is random: if it exists, it is ours
		return err
	}
	err = p.b.PutIfAbsent(ctx, key, p.second)
	if err != nil && !errors.Is(err, ErrExists) {
		return err
	}
	var first, second bool
	gerr := thrice(func() error {
		got, gerr := p.b.Get(ctx, key, int64(len(p.second)))
		first, second = bytes.Equal(got, p.first), bytes.Equal(got, p.second)
		if gerr == nil && !first && !second {
			gerr = fmt.Errorf("%w: %s reads as neither of the two objects written", ErrCorrupt, key)
		}
		return gerr
	})
	switch {
	case gerr != nil:
		return gerr
	case first && err != nil:
		p.caps.ConditionalPut = ConditionalHonoured
		return nil
	}
	p.caps.ConditionalPut = ConditionalIgnored
	return fmt.Errorf("%w: a second conditional put of %s was accepted", ErrNoConditionalPut, key)
}

func ignoreExists(err error) error {
	if errors.Is(err, ErrExists) {
		return nil
	}
	return err
}

// ranges reads inside, across and behind the end of the second object.
func (p *prober) ranges(ctx context.Context, keys []string) error {
	size := int64(len(p.second))
	for _, r := range []struct{ off, n int64 }{{0, 4}, {5, 7}, {size - 3, 8}, {size, 4}, {size + 9, 4}} {
		want := p.second[min(r.off, size):min(r.off+r.n, size)]
		into := make([]byte, r.n)
		n, err := p.b.GetRange(ctx, keys[1], r.off, into)
		if err != nil {
			return err
		}
		if !bytes.Equal(into[:n], want) {
			return fmt.Errorf("%w: a ranged get of %d bytes at %d brought other bytes", ErrUnsupported, r.n, r.off)
		}
	}
	p.caps.RangedGet = true
	return nil
}

// list pages through the two objects.
func (p *prober) list(ctx context.Context, keys []string) error {
	check := func(startAfter string, max int, want ...string) error {
		page, err := p.b.List(ctx, p.prefix, startAfter, max)
		if err != nil {
			return err
		}
		var got []string
		for _, info := range page {
			got = append(got, info.Key)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("%w: a listing from %q on brought %q instead of %q", ErrUnsupported, startAfter, got, want)
		}
		return nil
	}
	err := check("", 10, keys[0], keys[1])
	if err == nil {
		err = check("", 1, keys[0])
	}
	if err == nil {
		err = check(keys[0], 10, keys[1])
	}
	if err == nil {
		err = check(keys[1], 10)
	}
	p.caps.OrderedList = err == nil
	return err
}

// clock compares the store's time of writing with ours.
func (p *prober) clock(ctx context.Context, keys []string) error {
	info, err := p.b.Head(ctx, keys[1])
	if err != nil {
		return err
	}
	if info.Size != int64(len(p.second)) {
		return fmt.Errorf("%w: %s has %d bytes, written were %d", ErrCorrupt, keys[1], info.Size, len(p.second))
	}
	p.caps.Clock = time.Until(info.Modified).Round(time.Second)
	return nil
}
