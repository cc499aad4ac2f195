/* The scanner of Kineto events: JSON text in, one row of numbers per wanted event out. */
#ifndef KVT_KINETO_H
#define KVT_KINETO_H

#include <stddef.h>
#include <stdint.h>

#define KVT_EXPORT __attribute__((visibility("default")))

enum { KVT_MORE = 0, KVT_END = 1, KVT_FULL = 2, KVT_BROKEN = 3, KVT_MEMORY = 4 };

typedef struct {
    int64_t start_ns, dur_ns, pid, tid, correlation, bytes, graph;
    int32_t stream, device, channel, count, cbid, name, label; /* names by number; label: args.name of a meta event */
    uint8_t category; /* the code it was asked for with; META for process and thread names */
    uint8_t numeric;  /* which of a call's numbers fit; reserved */
    uint8_t pad[2];
} kvt_row; /* 88 bytes */

typedef struct kvt_scan_state kvt_scan_state;

/* Described where they are defined. */
kvt_scan_state *kvt_open(void);
void kvt_close(kvt_scan_state *s);
int kvt_want(kvt_scan_state *s, const char *category, uint8_t code);
int kvt_scan(kvt_scan_state *s, const char *text, size_t length, kvt_row *rows, size_t room, size_t *written,
             size_t *consumed);
uint32_t kvt_names(const kvt_scan_state *s);
const char *kvt_name(const kvt_scan_state *s, uint32_t number, uint32_t *length);

#endif
