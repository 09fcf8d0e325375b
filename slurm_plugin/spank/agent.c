/* The talk with the node's agent: register a job, wait for its lease within a bound, say when it has left. */
#include "cadenza.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define TICK_MS 250
/* A socket that nobody listens on was left by an agent that is being restarted: that takes less than this. */
#define RESTART_MS 5000

enum answer { GRANTED, WAIT, GIVEUP, REFUSED, SILENCE, LOST };

/* Never blocks: a full backlog counts as not reached. Returns the socket, or -1 and errno. */
static int reach(const char *path, const char *packet, size_t length)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int saved, fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		return -1;
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	if (!connect(fd, (struct sockaddr *)&address, sizeof(address)) &&
	    send(fd, packet, length, MSG_NOSIGNAL) == (ssize_t)length)
		return fd;
	saved = errno;
	close(fd);
	errno = saved;
	return -1;
}

static enum answer read_state(const char *packet)
{
	const char *state = strstr(packet, "\"state\"");

	if (!strstr(packet, "\"lease\"") || !state)
		return REFUSED;
	state += strlen("\"state\"");
	state += strspn(state, " :");
	if (!strncmp(state, "\"granted\"", 9))
		return GRANTED;
	return strncmp(state, "\"giveup\"", 8) ? WAIT : GIVEUP;
}

static enum answer next_answer(int fd)
{
	struct pollfd entry = {.fd = fd, .events = POLLIN};
	char packet[MAX_PACKET];
	ssize_t length;
	int ready = poll(&entry, fd < 0 ? 0 : 1, TICK_MS);

	if (ready == 0)
		return SILENCE;
	if (ready < 0)
		return errno == EINTR ? WAIT : LOST;
	length = recv(fd, packet, sizeof(packet) - 1, MSG_DONTWAIT);
	if (length <= 0)
		return LOST;
	packet[length] = '\0';
	return read_state(packet);
}

static bool host_without_agent(const struct job *job, bool met)
{
	return errno == ENOENT && job->lane == 0 && !met;
}

/* How long the agent may say nothing. An unmanaged job counts its whole wait, for it owes nobody a turn. */
static int bound_ms(const struct job *job, const struct config *config, bool met)
{
	int bound = config->wait_s * 1000;

	return job->lane == 0 && !met && bound > RESTART_MS ? RESTART_MS : bound;
}

/*
 * Time is counted in ticks of silence and not read from a clock: a job that is stopped while it waits (a suspend)
 * finds its lease in the socket when it is continued, and its bound where it was.
 */
enum verdict agent_wait(const struct job *job, const struct config *config)
{
	char packet[MAX_PACKET];
	size_t length = start_message(job, packet, sizeof(packet));
	bool met = false;
	int fd = -1;
	enum verdict verdict = AGENT_SILENT;

	for (int quiet_ms = 0; quiet_ms < bound_ms(job, config, met);) {
		enum answer answer;

		if (fd < 0 && (fd = reach(config->socket, packet, length)) < 0 && host_without_agent(job, met))
			return AGENT_ABSENT;
		met = met || fd >= 0;
		answer = next_answer(fd);
		if (answer == GRANTED || answer == GIVEUP) {
			verdict = answer == GRANTED ? LEASE_GRANTED : AGENT_GIVES_UP;
			break;
		}
		if (answer == WAIT && job->managed)
			quiet_ms = 0;
		else
			quiet_ms += TICK_MS;
		if (answer == LOST || answer == REFUSED) {
			close(fd);
			fd = -1;
			poll(NULL, 0, TICK_MS);
		}
	}
	if (fd >= 0)
		close(fd);
	return verdict;
}

void agent_tell_end(uint32_t id, const struct config *config)
{
	char packet[MAX_PACKET];
	int fd = reach(config->socket, packet, end_message(id, packet, sizeof(packet)));

	if (fd >= 0)
		close(fd);
}
