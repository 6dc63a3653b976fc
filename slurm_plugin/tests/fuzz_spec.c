/*
 * Any bytes as a SPEC: the parser must stay within them, and what it accepts must be a fixed point:
 * accepted again, and the same. Built with libFuzzer (`make fuzz`), and into fuzz_replay, which
 * only plays known inputs.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "spec.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(int is_so)
{
	if (!is_so)
		abort();
}

static void check_accepted(const char *text, const struct flashrec_spec *spec)
{
	struct flashrec_spec again;
	char reason[FLASHREC_REASON_MAX];

	demand(strlen(spec->text) <= strlen(text));
	demand(flashrec_spec_parse(spec->text, &again, reason));
	demand(strcmp(again.text, spec->text) == 0 && again.is_off == spec->is_off);
	demand(spec->is_off == (strcmp(text, "off") == 0));
	for (const char *at = text; *at; at++)
		demand((unsigned char)*at >= ' ' && *at != 127);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct flashrec_spec spec;
	char reason[FLASHREC_REASON_MAX];
	char *text = malloc(size + 1); /* of its own size, so that a step beyond it is seen */

	demand(text != NULL);
	memcpy(text, data, size);
	text[size] = '\0';
	if (flashrec_spec_parse(text, &spec, reason))
		check_accepted(text, &spec);
	else
		demand(reason[0] && memchr(reason, '\0', sizeof(reason)) != NULL);
	free(text);
	return 0;
}
