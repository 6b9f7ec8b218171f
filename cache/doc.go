// Package cache is the volume engine: a write-back cache in front of an object
// store that keeps, per volume, an explicit promise of where an acknowledged write
// lives. DESIGN.md in this directory states the invariants.
package cache
