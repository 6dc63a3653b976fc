/* The grammar: every case of tests/plugin/specs.txt, which the Python parser is tested with as
 * well. */
#include "check.h"
#include "spec.h"

enum { MAX_LINE = 8192 };

/* \xHH is one byte, {C*N} is N times C. */
static void expand(const char *from, char *to)
{
	unsigned int byte, count;
	char repeated;
	int length;

	while (*from) {
		if (sscanf(from, "\\x%2x", &byte) == 1 && from[1] == 'x') {
			*to++ = (char)byte;
			from += 4;
		} else if (sscanf(from, "{%c*%u}%n", &repeated, &count, &length) == 2) {
			memset(to, repeated, count);
			to += count;
			from += length;
		} else {
			*to++ = *from++;
		}
	}
	*to = '\0';
}

static void check_good(const char *text, const char *canonical, int number)
{
	struct flashrec_spec spec, again;
	char reason[FLASHREC_REASON_MAX] = "";

	if (!flashrec_spec_parse(text, &spec, reason) || strcmp(spec.text, canonical) != 0) {
		fprintf(stderr, "line %d: \"%s\" is \"%s\", not \"%s\" (%s)\n", number, text,
			spec.text, canonical, reason);
		exit(1);
	}
	CHECK(spec.is_off == (strcmp(canonical, "off") == 0));
	CHECK(flashrec_spec_parse(spec.text, &again, reason));
	CHECK_TEXT(again.text, spec.text);
}

static void check_bad(const char *text, int number)
{
	struct flashrec_spec spec = {.text = "untouched"};
	char reason[FLASHREC_REASON_MAX] = "";

	if (flashrec_spec_parse(text, &spec, reason)) {
		fprintf(stderr, "line %d: \"%s\" is accepted\n", number, text);
		exit(1);
	}
	CHECK_TEXT(spec.text, "untouched");
	CHECK(reason[0] && strlen(reason) < sizeof(reason));
	for (const char *at = reason; *at; at++)
		CHECK(*at >= ' ' && *at <= '~');
}

/* What users read. */
static void test_reasons(void)
{
	static const char *const CASES[][2] = {
	    {"spares=two", "not a number of 1 to 6 digits: \"two\""},
	    {"spare=1", "unknown item: \"spare=1\""},
	    {"spares", "a value is missing: \"spares\""},
	    {"spares=1,", "an item is empty: \"\""},
	    {"spares=1,off", "off stands alone, without other items: \"off\""},
	    {"tier=cold", "tier is hot, warm or pool, not: \"cold\""},
	    {"pool=a b", "not a pool's name (1 to 63 letters, digits, - _ .): \"a b\""},
	    {"pool=a,pool=b", "given twice: \"pool\""},
	    {"config=", "config wants the name of a file, not: \"\""},
	    {"config=a\tb", "control character in the file name: \"a?b\""},
	    {"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
	     "unknown item: \"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...\""},
	};

	for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
		struct flashrec_spec spec;
		char reason[FLASHREC_REASON_MAX];

		CHECK(!flashrec_spec_parse(CASES[i][0], &spec, reason));
		CHECK_TEXT(reason, CASES[i][1]);
	}
}

int main(int argc, char **argv)
{
	static char line[MAX_LINE], spec[MAX_LINE], canonical[MAX_LINE];
	int number = 0, num_good = 0, num_bad = 0;
	FILE *file = argc == 2 ? fopen(argv[1], "r") : NULL;

	CHECK(file);
	while (fgets(line, sizeof(line), file)) {
		char *rest = line, *kind, *from, *to;

		number++;
		line[strcspn(line, "\n")] = '\0';
		if (line[0] == '#' || !line[0])
			continue;
		kind = strsep(&rest, "\t");
		from = strsep(&rest, "\t");
		to = strsep(&rest, "\t");
		CHECK(kind && from);
		expand(from, spec);
		if (strcmp(kind, "ok") == 0) {
			CHECK(to);
			expand(to, canonical);
			check_good(spec, canonical, number);
			num_good++;
		} else {
			CHECK_TEXT(kind, "bad");
			check_bad(spec, number);
			num_bad++;
		}
	}
	fclose(file);
	test_reasons();
	CHECK(num_good > 20 && num_bad > 60);
	PASSED("spec");
	return 0;
}
