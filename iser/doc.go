// Package iser is the datamover of iSCSI over RDMA (RFC 7145), target side: control PDUs travel in Sends, read data by RDMA Write, what
// the initiator did not send with a command by RDMA Read. It implements iscsi.Datamover over any provider of iser/rdma.
package iser
