package objectstore_test

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isergate/isergate/objectstore"
	"github.com/isergate/isergate/objectstore/buckettest"
	"github.com/isergate/isergate/objectstore/faulty"
)

func TestConformance(t *testing.T) {
	mem := func(*testing.T) objectstore.Bucket { return objectstore.NewMem() }
	for _, c := range []struct {
		name string
		open func(t *testing.T) objectstore.Bucket
	}{
		{"mem", mem},
		{"dir", func(t *testing.T) objectstore.Bucket { return open(t, "file://"+t.TempDir()+"/made/here") }},
		{"retry", func(t *testing.T) objectstore.Bucket {
			return objectstore.WithRetry(mem(t), objectstore.RetryOptions{})
		}},
		{"limit", func(t *testing.T) objectstore.Bucket { return objectstore.WithLimit(mem(t), 3) }},
		{"metrics", func(t *testing.T) objectstore.Bucket {
			m, err := objectstore.NewMetrics(prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			return objectstore.WithMetrics(mem(t), m)
		}},
		{"faulty", func(t *testing.T) objectstore.Bucket { return faulty.Wrap(mem(t)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			buckettest.Run(t, c.open)
		})
	}
}

func open(t *testing.T, url string) objectstore.Bucket {
	t.Helper()
	b, err := objectstore.Open(t.Context(), url, objectstore.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}
