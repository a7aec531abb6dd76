/* Copyright (c) 2026, gpuhost.inference contributors
 * GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
 * SPDX-License-Identifier: GPL-3.0-or-later
 *
 * A server that computes nothing and streams chat completions at a known pace, for measuring
 * clients. One thread, epoll. The first token comes at once, each further one MICROSECONDS after
 * the one before, by the clock and not by when the last was sent; 0 is as fast as it goes.
 *
 * usage: stub_server PORT MICROSECONDS [LOW HIGH]    (LOW to HIGH: lengths instead of what is asked)
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096
#define ROOM (1 << 20)

struct connection {
    char *in, *out;
    size_t got, held;       /* bytes in `in`, bytes in `out` that are not sent yet */
    int left, total;        /* tokens of the request under way; left 0: none */
    int64_t due;            /* when the next token is to be sent, nanoseconds */
    int open, waits;        /* `waits`: for the socket to take more */
};

static struct connection peers[MOST];
static int64_t gap;
static int low, high, poller, top; /* no connection has a higher number than `top` */
static uint32_t state = 12345;
static long long tokens_sent;
static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                           "transfer-encoding: chunked\r\n\r\n";

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void end(int fd)
{
    close(fd);
    free(peers[fd].in);
    free(peers[fd].out);
    memset(&peers[fd], 0, sizeof peers[fd]);
}

/* sends what is held; what the socket does not take stays */
static void flush(int fd)
{
    struct connection *p = &peers[fd];
    while (p->held) {
        ssize_t n = send(fd, p->out, p->held, MSG_NOSIGNAL);
        if (n <= 0) {
            if (errno != EAGAIN) {
                end(fd);
                return;
            }
            break;
        }
        memmove(p->out, p->out + n, p->held - n);
        p->held -= n;
    }
    if (p->waits != (p->held > 0)) {
        p->waits = p->held > 0;
        struct epoll_event e = {.events = EPOLLIN | (p->waits ? EPOLLOUT : 0), .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_MOD, fd, &e);
    }
}

static void put(int fd, const char *text, size_t size)
{
    struct connection *p = &peers[fd];
    if (p->held + size > ROOM)
        exit(4); /* a client that does not read */
    memcpy(p->out + p->held, text, size);
    p->held += size;
}

static void event(int fd, const char *json)
{
    char line[1024];
    int size = (int)strlen(json) + 8;
    put(fd, line, snprintf(line, sizeof line, "%x\r\ndata: %s\n\n\r\n", size, json));
}

static void token(int fd)
{
    struct connection *p = &peers[fd];
    char json[512];
    snprintf(json, sizeof json,
             "{\"id\":\"6f1c3a0d9b7e4f52a8c4d2e1b0a99871\",\"object\":\"chat.completion.chunk\","
             "\"created\":1790000000,\"model\":\"stub\",\"choices\":[{\"index\":0,\"delta\":"
             "{\"content\":\"word \",\"reasoning_content\":null},\"logprobs\":null,"
             "\"finish_reason\":null,\"matched_stop\":null}]}");
    event(fd, json);
    tokens_sent++;
    if (--p->left == 0) {
        snprintf(json, sizeof json,
                 "{\"id\":\"6f1c\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,"
                 "\"model\":\"stub\",\"choices\":[],\"usage\":{\"prompt_tokens\":20,"
                 "\"total_tokens\":%d,\"completion_tokens\":%d}}",
                 20 + p->total, p->total);
        event(fd, json);
        event(fd, "[DONE]");
        put(fd, "0\r\n\r\n", 5);
    } else {
        p->due += gap;
    }
}

static void reply(int fd, const char *body)
{
    char text[2048];
    put(fd, text,
        snprintf(text, sizeof text,
                 "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                 strlen(body), body));
    flush(fd);
}

/* answers the first whole request of a connection; returns 0 when there is none */
static int take(int fd)
{
    struct connection *p = &peers[fd];
    char *stop = memmem(p->in, p->got, "\r\n\r\n", 4);
    if (!stop)
        return 0;
    *stop = 0;
    char *field = strcasestr(p->in, "\ncontent-length:");
    size_t length = field ? strtoul(field + 16, NULL, 10) : 0, all = stop + 4 - p->in + length;
    if (p->got < all) {
        *stop = '\r';
        return 0;
    }
    int chat = strstr(p->in, "POST ") == p->in && strstr(p->in, "/chat/completions") != NULL;
    int close_it = strcasestr(p->in, "\nconnection: close") != NULL;
    if (chat) {
        char *limit = memmem(stop + 4, length, "\"max_completion_tokens\":", 24);
        p->total = limit ? atoi(limit + 24) : 16;
        if (high) {
            state = state * 1664525u + 1013904223u;
            p->total = low + (int)((state >> 8) % (uint32_t)(high - low + 1));
        }
        p->left = p->total;
        p->due = now();
        put(fd, HEAD, sizeof HEAD - 1);
    } else if (strstr(p->in, "/v1/models")) {
        reply(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"stub\",\"object\":\"model\"}]}");
    } else if (strstr(p->in, "server_info")) {
        reply(fd, "{\"version\":\"0.5.23\",\"internal_states\":[{}]}");
    } else {
        reply(fd, "{}");
    }
    if (!peers[fd].open)
        return 0;
    memmove(p->in, p->in + all, p->got - all);
    p->got -= all;
    if (close_it && !chat && p->held == 0) {
        end(fd);
        return 0;
    }
    return 1;
}

static void receive(int fd)
{
    struct connection *p = &peers[fd];
    ssize_t n = recv(fd, p->in + p->got, ROOM - p->got - 1, 0);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN)
            end(fd);
        return;
    }
    p->got += n;
    p->in[p->got] = 0;
    while (p->open && !p->left && take(fd))
        ;
}

static void report(int number)
{
    struct rusage used;
    (void)number;
    getrusage(RUSAGE_SELF, &used);
    printf("%lld %.3f\n", tokens_sent,
           used.ru_utime.tv_sec + used.ru_stime.tv_sec +
               (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6);
    exit(0);
}

int main(int count, char **words)
{
    if (count != 3 && count != 5) {
        fprintf(stderr, "usage: stub_server PORT MICROSECONDS [LOW HIGH]\n");
        return 2;
    }
    gap = atoll(words[2]) * 1000;
    low = count == 5 ? atoi(words[3]) : 0;
    high = count == 5 ? atoi(words[4]) : 0;
    signal(SIGTERM, report);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), yes = 1;
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)atoi(words[1])),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024)) {
        perror("stub_server");
        return 1;
    }
    poller = epoll_create1(0);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int64_t next = INT64_MAX, moment = now();
        for (int fd = 0; fd <= top; fd++) {
            struct connection *p = &peers[fd];
            if (!p->open || !p->left)
                continue;
            if (gap == 0) {
                if (p->held < 65536)
                    for (int n = 0; n < 16 && p->left; n++)
                        token(fd);
            } else {
                while (p->left && p->due <= moment)
                    token(fd);
            }
            if (p->held)
                flush(fd);
            if (p->open && p->left && (gap || p->held < 65536) && p->due < next)
                next = p->due;
            if (p->open && !p->left && p->got)
                while (p->open && !p->left && take(fd))
                    ;
        }
        struct timespec wait = {0, 0};
        int64_t pause = next == INT64_MAX ? 1000000000 : next - now();
        if (pause < 0)
            pause = 0;
        wait.tv_sec = pause / 1000000000;
        wait.tv_nsec = pause % 1000000000;
        int many = epoll_pwait2(poller, ready, 256, &wait, NULL);
        for (int n = 0; n < many; n++) {
            int fd = ready[n].data.fd;
            if (fd == listener) {
                int one = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (one < 0 || one >= MOST)
                    continue;
                top = one > top ? one : top;
                setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                peers[one] = (struct connection){.in = malloc(ROOM), .out = malloc(ROOM), .open = 1};
                struct epoll_event f = {.events = EPOLLIN, .data.fd = one};
                epoll_ctl(poller, EPOLL_CTL_ADD, one, &f);
                continue;
            }
            if (peers[fd].open && ready[n].events & EPOLLOUT)
                flush(fd);
            if (peers[fd].open && ready[n].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                receive(fd);
        }
    }
}
