/*
 * The SPEC of --flashrecovery: its grammar, as pure text without any I/O.
 *
 * The grammar is that of docs/reference/plugin-contract.md. flashrec has a parser of its own for
 * it; the cases that both must agree on are in tests/plugin/specs.txt.
 */
#ifndef FLASHREC_SPEC_H
#define FLASHREC_SPEC_H

#include <stdbool.h>
#include <stddef.h>

enum {
	FLASHREC_SPEC_MAX = 1024, /* bytes of a SPEC, without its end */
	FLASHREC_REASON_MAX = 160
};

/* What to type, for messages. */
#define FLASHREC_SPEC_GRAMMAR                                                                      \
	"--flashrecovery[=off | ITEM[,ITEM...]], ITEM one of spares=COUNT, tier=hot|warm|pool, "   \
	"pool=NAME, max-swaps=COUNT, config=FILE; each once, without spaces"

struct flashrec_spec {
	char text[FLASHREC_SPEC_MAX + 1]; /* in the one form that is passed on */
	bool is_off;                      /* "off": not for us */
};

/*
 * Reads a SPEC; "" means the defaults. False if it is not one: then `spec` is not touched, and
 * `reason` says in printable ASCII what is wrong with it.
 */
bool flashrec_spec_parse(const char *text, struct flashrec_spec *spec,
			 char reason[FLASHREC_REASON_MAX]);

#endif
