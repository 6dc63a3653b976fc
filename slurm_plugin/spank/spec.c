#include "spec.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DIGITS = 6, MAX_NAME = 63, MAX_SHOWN = 40 };

/* The keys, in the order in which they are passed on. */
enum key { SPARES, TIER, POOL, MAX_SWAPS, CONFIG, NUM_KEYS };

static const char *const KEYS[NUM_KEYS] = {"spares", "tier", "pool", "max-swaps", "config"};

/* A piece of the text; not terminated. */
struct span {
	const char *start;
	size_t length;
};

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool is_name_character(char c)
{
	return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
	       c == '_' || c == '.';
}

static bool is_control(char c)
{
	unsigned char byte = (unsigned char)c;

	return byte < 0x20 || byte == 0x7f;
}

static bool equals(struct span span, const char *text)
{
	return span.length == strlen(text) && memcmp(span.start, text, span.length) == 0;
}

static bool all(struct span span, bool (*is_allowed)(char))
{
	for (size_t i = 0; i < span.length; i++)
		if (!is_allowed(span.start[i]))
			return false;
	return true;
}

/*
 * Says what is wrong with a piece of the text. What cannot be printed in one line of ASCII
 * becomes '?'.
 */
static bool refuse(char reason[FLASHREC_REASON_MAX], const char *what, struct span span)
{
	char shown[MAX_SHOWN + 1];
	size_t length = span.length < MAX_SHOWN ? span.length : MAX_SHOWN;

	for (size_t i = 0; i < length; i++)
		shown[i] = span.start[i] >= ' ' && span.start[i] <= '~' ? span.start[i] : '?';
	shown[length] = '\0';
	snprintf(reason, FLASHREC_REASON_MAX, "%s: \"%s%s\"", what, shown,
		 span.length > length ? "..." : "");
	return false;
}

static bool check_count(struct span *value, char reason[FLASHREC_REASON_MAX])
{
	if (value->length < 1 || value->length > MAX_DIGITS || !all(*value, is_digit))
		return refuse(reason, "not a number of 1 to 6 digits", *value);
	while (value->length > 1 && value->start[0] == '0') {
		value->start++;
		value->length--;
	}
	return true;
}

static bool check_tier(struct span value, char reason[FLASHREC_REASON_MAX])
{
	if (!equals(value, "hot") && !equals(value, "warm") && !equals(value, "pool"))
		return refuse(reason, "tier is hot, warm or pool, not", value);
	return true;
}

static bool check_pool(struct span value, char reason[FLASHREC_REASON_MAX])
{
	if (value.length < 1 || value.length > MAX_NAME || !all(value, is_name_character))
		return refuse(reason, "not a pool's name (1 to 63 letters, digits, - _ .)", value);
	return true;
}

static bool check_config(struct span value, char reason[FLASHREC_REASON_MAX])
{
	if (value.length < 1)
		return refuse(reason, "config wants the name of a file, not", value);
	for (size_t i = 0; i < value.length; i++)
		if (is_control(value.start[i]))
			return refuse(reason, "control character in the file name", value);
	return true;
}

/* Checks the value of a key; a count loses its leading zeros. */
static bool check_value(enum key key, struct span *value, char reason[FLASHREC_REASON_MAX])
{
	switch (key) {
	case SPARES:
	case MAX_SWAPS:
		return check_count(value, reason);
	case TIER:
		return check_tier(*value, reason);
	case POOL:
		return check_pool(*value, reason);
	case CONFIG:
		return check_config(*value, reason);
	case NUM_KEYS:
		break;
	}
	return false;
}

static enum key find_key(struct span name)
{
	int key = 0;

	while (key < NUM_KEYS && !equals(name, KEYS[key]))
		key++;
	return (enum key)key;
}

static bool read_item(struct span item, struct span values[NUM_KEYS],
		      char reason[FLASHREC_REASON_MAX])
{
	const char *equal = memchr(item.start, '=', item.length);
	struct span name = {item.start, equal ? (size_t)(equal - item.start) : item.length};
	struct span value = {equal ? equal + 1 : NULL, 0};
	enum key key = find_key(name);

	if (item.length == 0)
		return refuse(reason, "an item is empty", item);
	if (equals(item, "off"))
		return refuse(reason, "off stands alone, without other items", item);
	if (key == NUM_KEYS)
		return refuse(reason, "unknown item", item);
	if (!equal)
		return refuse(reason, "a value is missing", item);
	if (values[key].start)
		return refuse(reason, "given twice", name);
	value.length = item.length - name.length - 1;
	if (!check_value(key, &value, reason))
		return false;
	values[key] = value;
	return true;
}

/* No value is longer than what it was read from, so the text of all of them fits. */
static void write_text(const struct span values[NUM_KEYS], char text[FLASHREC_SPEC_MAX + 1])
{
	size_t used = 0;

	text[0] = '\0';
	for (int key = 0; key < NUM_KEYS; key++)
		if (values[key].start)
			used += (size_t)snprintf(text + used, FLASHREC_SPEC_MAX + 1 - used,
						 "%s%s=%.*s", used ? "," : "", KEYS[key],
						 (int)values[key].length, values[key].start);
}

bool flashrec_spec_parse(const char *text, struct flashrec_spec *spec,
			 char reason[FLASHREC_REASON_MAX])
{
	struct span values[NUM_KEYS] = {{NULL, 0}};
	size_t length = strnlen(text, FLASHREC_SPEC_MAX + 1);
	const char *end = text + length;

	if (length > FLASHREC_SPEC_MAX)
		return refuse(reason, "longer than 1024 bytes", (struct span){text, length});
	if (strcmp(text, "off") == 0) {
		memcpy(spec->text, "off", sizeof("off"));
		spec->is_off = true;
		return true;
	}
	for (const char *at = text; length > 0; at++) {
		const char *comma = memchr(at, ',', (size_t)(end - at));
		const char *stop = comma ? comma : end;

		if (!read_item((struct span){at, (size_t)(stop - at)}, values, reason))
			return false;
		at = stop;
		if (at == end)
			break;
	}
	write_text(values, spec->text);
	spec->is_off = false;
	return true;
}
