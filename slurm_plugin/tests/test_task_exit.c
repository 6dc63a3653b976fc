/*
 * The datagram of a task's end, over real sockets: that it arrives, that it never waits, and where
 * it does not go. As root also with the sockets and folders of another user.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

enum { OTHER_USER = 54321, SOME_GROUP = 54322 };

static const char TEXT[] = "FLASHREC1 task_exit 77 4294967290 5 4242 768\n";

static char folder[] = "/tmp/flashrec-test-XXXXXX";
static char path[128], second_path[128];
static char *words[16];

static int listen_at(const char *where)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", where);
	unlink(where);
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
	return fd;
}

static void set_words(char *socket_path)
{
	static char python[] = "/usr/bin/python3", m[] = "-m", launch[] = "flashrec.agent.launch";
	static char option[] = "--exit-socket", key[] = "--key", k[] = "k", dashes[] = "--";
	static char train[] = "train.py", wrong[] = "/tmp/of-the-script";
	char *all[] = {python,      m,      launch, key,    k,     option,
		       socket_path, dashes, train,  option, wrong, NULL};

	memcpy(words, all, sizeof(all));
}

static void start(void)
{
	fake_reset();
	fake.context = S_CTX_REMOTE;
	fake.uid = geteuid();
	fake.gid = getegid();
	fake.job = 77;
	fake.step = 4294967290U;
	fake.task = 5;
	fake.pid = 4242;
	fake.status = 3 << 8;
	set_words(path);
	fake.argv = words;
}

static int num_open(void)
{
	int count = 0;

	for (int fd = 0; fd < 64; fd++)
		count += fcntl(fd, F_GETFD) != -1;
	return count;
}

/* Ends the test program if it blocks. */
static void send_one(void)
{
	int before = num_open();

	errno = ENOTTY;
	alarm(10);
	CHECK(flashrec_task_exit(NULL) == 0);
	alarm(0);
	CHECK(errno == ENOTTY);
	CHECK(num_open() == before);
	CHECK_TEXT(fake.said, "");
	CHECK((uid_t)setfsuid((uid_t)-1) == geteuid());
	CHECK((gid_t)setfsgid((gid_t)-1) == getegid());
}

static bool arrives(int fd)
{
	char text[256];
	ssize_t length = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);

	if (length < 0)
		return false;
	text[length] = '\0';
	CHECK_TEXT(text, TEXT);
	return true;
}

static void test_arrives(void)
{
	int fd = listen_at(path);

	start();
	send_one();
	CHECK(arrives(fd));
	CHECK(!arrives(fd));
	send_one();
	CHECK(arrives(fd));
	close(fd);
}

static void test_only_for_our_launcher(void)
{
	static char other[] = "flashrec.agent", script[] = "train.py";
	int fd = listen_at(path);

	start();
	words[2] = other;
	send_one();
	start();
	words[1] = script;
	send_one();
	start();
	words[5] = script;
	send_one();
	start();
	words[6] = NULL; /* the option is the last word */
	send_one();
	start();
	words[0] = NULL;
	send_one();
	start();
	fake.argv = NULL;
	send_one();
	CHECK(!arrives(fd));
	close(fd);
}

static void test_items_that_cannot_be_had(void)
{
	static const int ITEMS[] = {S_JOB_ARGV,   S_JOB_UID,        S_JOB_GID,  S_JOB_ID,
				    S_JOB_STEPID, S_TASK_GLOBAL_ID, S_TASK_PID, S_TASK_EXIT_STATUS};
	int fd = listen_at(path);

	for (size_t i = 0; i < sizeof(ITEMS) / sizeof(ITEMS[0]); i++) {
		start();
		fake.missing_item = ITEMS[i];
		send_one();
	}
	CHECK(!arrives(fd));
	close(fd);
}

static void test_agent_is_gone(void)
{
	close(listen_at(path));
	start();
	send_one(); /* its socket is still there */
	CHECK(unlink(path) == 0);
	send_one();
	CHECK(access(path, F_OK) != 0);
}

static void test_full_socket_is_not_waited_for(void)
{
	int fd = listen_at(path), sent = 0;
	struct pollfd waiting = {.fd = fd, .events = POLLIN};

	start();
	for (int i = 0; i < 5000; i++)
		send_one();
	while (arrives(fd))
		sent++;
	CHECK(sent > 0 && sent < 5000);
	CHECK(poll(&waiting, 1, 0) == 0);
	close(fd);
}

static void test_paths_that_are_refused(void)
{
	static char relative[] = "agent.exit", empty[] = "", long_path[200] = "/";
	static char *refused[] = {relative, empty, long_path};
	int fd = listen_at(path);

	memset(long_path + 1, 'x', sizeof(long_path) - 2);
	CHECK(chdir(folder) == 0);
	for (int i = 0; i < 3; i++) {
		start();
		set_words(refused[i]);
		send_one();
	}
	CHECK(!arrives(fd));
	CHECK(chdir("/") == 0);
	close(fd);
}

/* One command line serves all nodes of a job step. */
static void test_node_name_in_the_file_name(void)
{
	static char pattern[128], in_folder[128];
	int fd = listen_at(path), second;

	snprintf(pattern, sizeof(pattern), "%s/%%N-%%N.%%n%%", folder);
	snprintf(in_folder, sizeof(in_folder), "%s/%%N/../agent.exit", folder);
	snprintf(second_path, sizeof(second_path), "%s/n12-n12.%%n%%", folder);
	second = listen_at(second_path);
	start();
	set_words(pattern);
	send_one(); /* the NodeName cannot be had */
	CHECK(!arrives(second));
	CHECK(spank_setenv(NULL, "SLURMD_NODENAME", "n12", 1) == ESPANK_SUCCESS);
	send_one();
	CHECK(arrives(second) && !arrives(fd));
	/* of folders nothing is replaced */
	snprintf(pattern, sizeof(pattern), "%s/n12", folder);
	CHECK(mkdir(pattern, 0700) == 0);
	set_words(in_folder);
	send_one();
	CHECK(!arrives(fd));
	CHECK(rmdir(pattern) == 0 && unlink(second_path) == 0);
	snprintf(second_path, sizeof(second_path), "%s/second", folder);
	close(fd);
	close(second);
}

/* 107 bytes are the most that a socket's address holds, the NodeName included. */
static void test_longest_path(void)
{
	static char pattern[160];
	char node[64];
	int length, fd;

	start();
	length = snprintf(second_path, sizeof(second_path), "%s/%.*s", folder,
			  107 - (int)strlen(folder) - 1,
			  "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn"
			  "nnnnnnnnnnnnnnnnnnnnnn");
	CHECK(length == 107);
	fd = listen_at(second_path);
	snprintf(node, sizeof(node), "%.40s", second_path + 107 - 40);
	CHECK(spank_setenv(NULL, "SLURMD_NODENAME", node, 1) == ESPANK_SUCCESS);
	snprintf(pattern, sizeof(pattern), "%.67s%%N", second_path);
	set_words(pattern);
	send_one();
	CHECK(arrives(fd));
	snprintf(pattern, sizeof(pattern), "%.67s%%Nn", second_path);
	send_one();
	snprintf(pattern, sizeof(pattern), "%.67sn%%N", second_path);
	send_one();
	CHECK(!arrives(fd));
	close(fd);
	CHECK(unlink(second_path) == 0);
	snprintf(second_path, sizeof(second_path), "%s/second", folder);
}

static void test_what_is_no_socket_is_left_alone(void)
{
	int fd;

	start();
	unlink(path);
	fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
	CHECK(fd >= 0);
	send_one();
	CHECK(lseek(fd, 0, SEEK_END) == 0);
	close(fd);
	unlink(path);
	CHECK(mkfifo(path, 0600) == 0);
	send_one();
	unlink(path);
	set_words(folder);
	send_one();
}

static void test_symbolic_link_is_not_followed(void)
{
	int fd = listen_at(second_path);

	start();
	unlink(path);
	CHECK(symlink(second_path, path) == 0);
	send_one();
	CHECK(!arrives(fd));
	unlink(path);
	close(fd);
}

static void test_socket_of_another_user(void)
{
	int fd = listen_at(path);

	start();
	fake.uid = OTHER_USER;
	send_one();
	CHECK(!arrives(fd));
	/* even if that user lets everybody send */
	CHECK(chmod(folder, 0755) == 0 && chmod(path, 0777) == 0);
	send_one();
	CHECK(!arrives(fd));
	CHECK(chmod(folder, 0700) == 0);
	close(fd);
}

static void swap(void)
{
	CHECK(rename(second_path, path) == 0);
}

/* A user puts another socket into the place of the one that was looked at. */
static void test_socket_cannot_be_exchanged(void)
{
	int fd = listen_at(path), swapped_in = listen_at(second_path);

	start();
	fake.before_fstat = swap;
	send_one();
	CHECK(arrives(fd));
	CHECK(!arrives(swapped_in));
	close(fd);
	close(swapped_in);
}

/* Root alone can try these: the rights are the user's, whoever slurmstepd is. */
static void test_rights_are_the_users(void)
{
	int fd;

	if (geteuid() != 0)
		return;
	fd = listen_at(path);
	CHECK(chown(path, OTHER_USER, OTHER_USER) == 0);
	start();
	fake.uid = OTHER_USER;
	send_one(); /* the folder is root's, mode 0700 */
	CHECK(!arrives(fd));
	CHECK(chown(folder, OTHER_USER, OTHER_USER) == 0);
	send_one();
	CHECK(arrives(fd));
	CHECK(chmod(path, 0) == 0);
	send_one();
	CHECK(!arrives(fd));
	CHECK(chown(folder, 0, 0) == 0);
	close(fd);
}

/* A user who could look up what root's groups may would learn what is in their folders. */
static void test_rights_are_not_those_of_roots_groups(void)
{
	static const gid_t SOME[] = {SOME_GROUP};
	gid_t groups[64], kept[2];
	int fd, num_groups = getgroups(64, groups);

	if (geteuid() != 0)
		return;
	CHECK(num_groups >= 0 && setgroups(1, SOME) == 0);
	fd = listen_at(path);
	CHECK(chown(path, OTHER_USER, OTHER_USER) == 0);
	CHECK(chmod(folder, 0750) == 0 && chown(folder, 0, 0) == 0);
	start();
	fake.uid = OTHER_USER;
	fake.gid = OTHER_USER;
	send_one();
	CHECK(chown(folder, 0, SOME_GROUP) == 0);
	send_one();
	CHECK(!arrives(fd));
	CHECK(chown(folder, 0, OTHER_USER) == 0);
	send_one();
	CHECK(arrives(fd));
	CHECK(getgroups(2, kept) == 1 && kept[0] == SOME_GROUP);
	CHECK(chmod(folder, 0700) == 0 && chown(folder, 0, 0) == 0);
	CHECK(setgroups((size_t)num_groups, groups) == 0);
	close(fd);
}

int main(void)
{
	CHECK(mkdtemp(folder));
	snprintf(path, sizeof(path), "%s/agent.exit", folder);
	snprintf(second_path, sizeof(second_path), "%s/second", folder);
	test_arrives();
	test_only_for_our_launcher();
	test_items_that_cannot_be_had();
	test_agent_is_gone();
	test_full_socket_is_not_waited_for();
	test_paths_that_are_refused();
	test_node_name_in_the_file_name();
	test_longest_path();
	test_what_is_no_socket_is_left_alone();
	test_symbolic_link_is_not_followed();
	test_socket_of_another_user();
	test_socket_cannot_be_exchanged();
	test_rights_are_the_users();
	test_rights_are_not_those_of_roots_groups();
	unlink(path);
	unlink(second_path);
	CHECK(rmdir(folder) == 0);
	PASSED("task_exit");
	return 0;
}
