// Package portal is one TCP port for both worlds: initiators that speak iSCSI over TCP (RFC 7143) and those
// that speak iSER over iWARP (RFC 7145) log in at the same address. DESIGN.md states what it guarantees.
package portal
