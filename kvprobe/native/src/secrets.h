/* Takes the secrets out of a command line. kvprobe/runfolder/secrets.py says the rules; a test holds both equal. */
#ifndef KVP_SECRETS_H
#define KVP_SECRETS_H

#include <stddef.h>

/* Writes `text` to `out`, cut to `size` with its NUL, each secret as ***. Words are separated by spaces. */
__attribute__((visibility("hidden"))) void kvp_redact(const char *text, char *out, size_t size);

#endif
