// Package volumelog is the log-structured form of one volume in a bucket, and
// the protocol over it: open an epoch, fence the older ones, put objects, write
// checkpoints, restore, list, inspect, purge.
//
// It imports only the Bucket interface. It knows nothing of journals, maps and
// initiators: a caller hands in extents and their bytes, in LSN order, and is
// handed headers back. DESIGN.md has the protocol's rules and invariants.
//
// # Keys
//
//	volumes/<uuid>/log/<epoch>/<seq>                          one object of the log
//	volumes/<uuid>/checkpoint/<epoch>/<seq>                   a checkpoint's manifest, put last
//	volumes/<uuid>/checkpoint-part/<epoch>/<seq>/<attempt>/<n>  its entries
//
// uuid is in its usual lower-case form, epoch and seq are 16 lower-case hex digits, n is 8,
// so that the order of keys is the order of numbers. attempt is a random UUID: a
// checkpoint that was begun and not finished never mixes with the one that was. The
// <epoch>/<seq> of a checkpoint is the key at which the log goes on after it.
//
// # Numbers
//
// All integers are little-endian. Reserved bytes are zero and checked. CRC32C is the
// Castagnoli polynomial, XXH3 the hash of the xxHash family. Lengths, offsets and payload places are multiples of 512.
//
// # Log object
//
//	+----------------------------+  0
//	| header, fixed part         |
//	+----------------------------+  416
//	| extent 0 .. extent n-1     |  32 bytes each
//	+----------------------------+
//	| zeros                      |
//	+----------------------------+  header length, a multiple of 4096, at most 16 MiB
//	| frame 0                    |  65536 bytes of payload + 8 bytes trailer
//	| frame 1                    |
//	| ...                        |
//	| last frame                 |  512 to 65536 bytes of payload + 8 bytes trailer
//	+----------------------------+
//
// Fixed part. The first 20 bytes mean the same in every version, and so does the
// rule of the checksum: a reader can tell a newer version from a damaged one.
//
//	  0   8  magic "ISERGLOG"
//	  8   4  version, 2
//	 12   4  header length in bytes
//	 16   4  CRC32C of bytes 0..15 and 20..header length
//	 20   2  kind: 1 open, 2 data, 3 fence
//	 22   2  compression of the payload; 0 none
//	 24  16  volume UUID
//	 40   8  epoch
//	 48   8  seq
//	 56   8  generation
//	 64  16  writer: node UUID
//	 80  16  writer: nonce
//	 96   8  first LSN
//	104   8  last LSN; one less than the first if the object holds no write
//	112   8  time of the last LSN, nanoseconds since 1970 UTC, signed
//	120   8  volume size in bytes
//	128   4  block size in bytes
//	132   4  number of extents
//	136   8  payload length in bytes, without trailers
//	144   4  CRC32C of the frames' trailers, in order
//	148   4  key id of client-side encryption; 0 none
//	152   6  reserved
//	158   2  length of the volume's name in bytes, at most 256
//	160 256  volume name, UTF-8, then zeros
//
// Extent.
//
//	 0   8  LSN of the write
//	 8   8  offset in the volume, bytes
//	16   8  length, bytes
//	24   4  place of its data in the payload, in units of 512 bytes
//	28   2  length of the repeated block, in units of 512 bytes; 0 unless kind is same
//	30   1  kind: 1 data, 2 zero, 3 same
//	31   1  reserved
//
// Frame trailer. The seed is the XXH3 of 40 bytes that are not stored, namely volume UUID, epoch,
// seq, frame index (4) and the length of the frame's payload (4).
// Bytes of another volume, object, or place in the object do not pass. It is no CRC, because
// payload that ends with its own CRC32C, as file systems and databases write it, has the CRC32C
// of all such payload.
//
//	0   8  XXH3 (64 bits, with the seed) of the payload
//
// # Checkpoint manifest
//
//	  0   8  magic "ISERGCKP"
//	  8   4  version, 2
//	 12   4  length of the object in bytes
//	 16   4  CRC32C of bytes 0..15 and 20..length
//	 20   4  number of parts
//	 24  16  volume UUID
//	 40   8  epoch  \ the key at which the log goes on
//	 48   8  seq    /
//	 56   8  generation
//	 64  16  writer: node UUID
//	 80  16  writer: nonce
//	 96   8  LSN: the checkpoint holds all writes up to it and nothing above
//	104   8  time of that LSN
//	112   8  volume size in bytes
//	120   4  block size in bytes
//	124   2  length of the volume's name
//	126   2  reserved
//	128  16  attempt
//	144   8  number of entries in all parts
//	152   8  reserved
//	160 256  volume name, UTF-8, then zeros
//	416  16  per part: length in bytes (4), its CRC32C field (4), entries (4), reserved (4)
//
// # Checkpoint part
//
//	 0   8  magic "ISERGCKE"
//	 8   4  version, 2
//	12   4  length of the object in bytes
//	16   4  CRC32C of bytes 0..15 and 20..length
//	20   4  number of entries
//	24  16  volume UUID
//	40   8  epoch
//	48   8  seq
//	56  16  attempt
//	72   4  index of the part
//	76   4  reserved
//	80  48  per entry, in ascending order of offset, not overlapping:
//	         0   8  LSN of the write; 0 not known
//	         8   8  offset in the volume, bytes
//	        16   8  length, bytes
//	        24   8  epoch of the object that holds the data
//	        32   8  seq of that object
//	        40   4  place of the data in its payload, in units of 512 bytes
//	        44   2  length of that object's header, in units of 4096 bytes
//	        46   1  kind: 1 data, 2 zero, 3 same
//	        47   1  length of the repeated block, in units of 512 bytes
package volumelog
