/* Takes the secrets out of a command line, as kvprobe/runfolder/secrets.py says; its functions are these. */
#define _GNU_SOURCE
#include "secrets.h"

#include <string.h>
#include <strings.h>

static const char *const whole[] = {"key", "keys", "auth", "pass", "pwd", "cookie"};
static const char *const endings[] = {"token",      "secret",     "password",    "passwd",       "apikey",
                                      "passphrase", "credential", "credentials", "authorization"};
static const char *const prefixes[] = {"sk-",   "hf_",   "nvapi-", "ghp_", "gho_",      "github_pat_",
                                       "xoxb-", "xoxp-", "glpat-", "AKIA", "eyJhbGciOi"};
static const char *const not_passwords[] = {"thread",  "ipe",    "rint",    "rint0", "refix", "ath",
                                            "arallel", "rofile", "rogress", "lugin", "ort"};
static const char *const schemes[] = {"bearer", "basic", "digest", "token"};
#define EACH(text, list) for (const char *const *text = list; text < list + sizeof list / sizeof *list; text++)
#define NAME "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"

struct span {
    const char *start;
    size_t size;
};

static int is(struct span s, const char *text) { return s.size == strlen(text) && !strncasecmp(s.start, text, s.size); }

static int same(struct span s, const char *text) { return s.size == strlen(text) && !memcmp(s.start, text, s.size); }

static int begins(struct span s, const char *text) {
    return s.size >= strlen(text) && !memcmp(s.start, text, strlen(text));
}

static int ends(struct span s, const char *text) {
    size_t n = strlen(text);
    return s.size >= n && !strncasecmp(s.start + s.size - n, text, n);
}

static int among(char c, const char *some) { return c && strchr(some, c); }

static struct span from(struct span s, size_t at) {
    return at < s.size ? (struct span){s.start + at, s.size - at} : (struct span){s.start + s.size, 0};
}

static int secret(struct span name) {
    while (name.size && *name.start == '-') name = from(name, 1);
    while (name.size && name.start[name.size - 1] == ':') name.size--;
    while (name.size) {
        size_t n = 0;
        while (n < name.size && !among(name.start[n], "-_.")) n++;
        struct span part = {name.start, n};
        EACH(one, whole) if (is(part, *one)) return 1;
        EACH(one, endings) if (ends(part, *one)) return 1;
        name = from(name, n + (n < name.size));
    }
    return 0;
}

static int option(struct span s) { return begins(s, "-") && !begins(s, "---"); }

static int number(struct span s) {
    size_t n = 0;
    while (n < s.size && among(s.start[n], "0123456789:.-")) n++;
    return n == s.size || begins(s, "/") || begins(s, "./");
}

static struct span unquoted(struct span s) {
    while (s.size && among(*s.start, "'\"")) s = from(s, 1);
    while (s.size && among(s.start[s.size - 1], "'\"")) s.size--;
    return s;
}

struct output {
    char *at, *end;
};

static void put(struct output *out, struct span s) {
    for (size_t i = 0; i < s.size && out->at < out->end; i++) *out->at++ = s.start[i];
}

static void put_text(struct output *out, const char *text) { put(out, (struct span){text, strlen(text)}); }

/* Without user and password of addresses. */
static void put_addresses(struct output *out, struct span rest) {
    for (const char *scheme; (scheme = memmem(rest.start, rest.size, "://", 3));) {
        const char *end = rest.start + rest.size, *host = scheme + 3, *to = host;
        put(out, (struct span){rest.start, (size_t)(host - rest.start)});
        while (to < end && *to != '/') to++;
        const char *at = memrchr(host, '@', (size_t)(to - host));
        if (at) put_text(out, "***"), host = at;
        rest = (struct span){host, (size_t)(end - host)};
    }
    put(out, rest);
}

/* A piece without the values of secret names. `to_end`: the last one reaches to the piece's end. */
static void put_values(struct output *out, struct span bare, struct span closed, char *hiding, int *to_end) {
    size_t start = 0, at = 0;
    while (at < bare.size) {
        size_t end = at, begin, value = at + 1, quote = value, until = bare.size;
        while (end > start && among(bare.start[end - 1], "\"'\\")) end--;
        for (begin = end; begin > start && among(bare.start[begin - 1], NAME);) begin--;
        if (!among(bare.start[at], ":=") || begins(from(bare, value), "//") ||
            !secret((struct span){bare.start + begin, end - begin})) {
            at++;
            continue;
        }
        int equals = bare.start[at] == '=';
        while (quote < bare.size && bare.start[quote] == '\\') quote++;
        int quoted = quote < bare.size && among(bare.start[quote], "'\"");
        if (quoted) {
            struct span rest = from(bare, quote + 1);
            const char *found = memchr(rest.start, bare.start[quote], rest.size);
            if (found)
                until = (size_t)(found - bare.start);
            else if (!memchr(closed.start, bare.start[quote], closed.size))
                *hiding = bare.start[quote];
            value = quote + 1;
        } else if (value < bare.size && memchr(bare.start, '?', begin)) {
            struct span rest = from(bare, value);
            const char *found = memchr(rest.start, '&', rest.size);
            if (found) until = (size_t)(found - bare.start);
        }
        put(out, (struct span){bare.start + start, value - start});
        if (value == bare.size && !quoted && !equals) {
            *hiding = '-';
            return;
        }
        put_text(out, "***");
        if (until == bare.size) {
            if (!quoted) EACH(one, schemes) if (is(from(bare, value), *one)) *hiding = '-';
            *to_end = !quoted && equals;
            return;
        }
        start = until, at = until + 1;
    }
    put(out, from(bare, start));
}

static void put_option(struct output *out, struct span piece, struct span bare, char *hiding) {
    struct span rest = from(bare, 2);
    int password = begins(bare, "-p") && !number(rest);
    EACH(one, not_passwords) if (same(rest, *one)) password = 0;
    if (secret(bare))
        *hiding = '-';
    else if (same(bare, "-p"))
        *hiding = 'p';
    else if (same(bare, "-u") || same(bare, "--user") || same(bare, "--proxy-user"))
        *hiding = 'u';
    else if (password || (begins(bare, "-u") && memchr(bare.start, ':', bare.size))) {
        put_text(out, password ? "-p***" : "-u***");
        return;
    }
    put(out, piece);
}

/* One piece. `hiding`: what is hidden of those after it, as `_piece` in secrets.py; 0 nothing. */
static void put_piece(struct output *out, struct span piece, char *hiding, int *to_end) {
    struct span bare = unquoted(piece);
    char was = *hiding;
    if (was == '"' || was == '\'') {
        put_text(out, "***");
        if (memchr(piece.start, was, piece.size)) *hiding = 0;
        return;
    }
    if (!bare.size) {
        put(out, piece);
        return;
    }
    if (was == '-' && among(*piece.start, "'\"")) {
        put_text(out, "***");
        if (!memchr(piece.start + 1, *piece.start, piece.size - 1)) *hiding = *piece.start;
        return;
    }
    if (!option(bare)) {
        int key = was == '-' || begins(bare, "-----BEGIN");
        if (key || (was == 'p' && !number(bare)) || (was == 'u' && memchr(bare.start, ':', bare.size))) {
            *hiding = key ? '-' : 0;
            put_text(out, "***");
            return;
        }
    }
    *hiding = 0;
    char values[4096], shown[4096]; /* a piece is shorter than 2048, and at most one in five characters becomes three */
    struct output first = {values, values + sizeof values}, second = {shown, shown + sizeof shown};
    const char *closed = bare.start + bare.size;
    put_values(&first, bare, (struct span){closed, (size_t)(piece.start + piece.size - closed)}, hiding, to_end);
    put_addresses(&second, (struct span){values, (size_t)(first.at - values)});
    struct span now = {shown, (size_t)(second.at - shown)};
    int changed = now.size != bare.size || memcmp(now.start, bare.start, bare.size) != 0;
    if (changed || *hiding) {
        put(out, changed ? now : piece);
        return;
    }
    EACH(one, prefixes) if (bare.size >= 16 && begins(bare, *one)) {
        put_text(out, "***");
        return;
    }
    if (option(bare) && !memchr(bare.start, '=', bare.size)) {
        put_option(out, piece, bare, hiding);
        return;
    }
    if (is(bare, "bearer")) *hiding = '-';
    put(out, piece);
}

void kvp_redact(const char *text, size_t bytes, char *out, size_t size) {
    struct output to = {out, out + size - 1};
    struct span word = {text, strnlen(text, bytes)};
    const char *end = text + bytes;
    int several = text + word.size + 1 < end;
    char hiding = 0;
    for (;;) {
        int hidden = several && hiding == '-' && !option(unquoted(word)); /* the word is a secret */
        for (;;) {
            size_t n = 0;
            while (n < word.size && !among(word.start[n], " \t\n")) n++;
            if (hidden)
                put_text(&to, n ? "***" : "");
            else
                put_piece(&to, (struct span){word.start, n}, &hiding, &hidden);
            hidden = hidden && several;
            if (n == word.size) break;
            put_text(&to, " ");
            word = from(word, n + 1);
        }
        text = word.start + word.size + 1;
        if (text >= end) break;
        put_text(&to, " ");
        word = (struct span){text, strnlen(text, (size_t)(end - text))};
    }
    *to.at = 0;
}
