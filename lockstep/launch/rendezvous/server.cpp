// SPDX-License-Identifier: Apache-2.0
// One thread owns all state; other threads hand it functions to run (call()). A connection passes
// three stages: it says who it is, proves that it knows the token, then it may ask. Until it has
// proven that it costs one small buffer, one of a few seats, and two seconds at most.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/launch/processes/poller.h"
#include "lockstep/launch/rendezvous/hmac.h"
#include "lockstep/launch/rendezvous/key_space.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "lockstep/launch/rendezvous/wire.h"

namespace lockstep::launch {
namespace {

constexpr size_t kMaxUnproven = 256;
constexpr milliseconds kProofTime{2'000};
constexpr milliseconds kRefusalReportEvery{5'000};
constexpr size_t kReadSize = 64u << 10;

enum class Stage { opening, proof, ready };

struct Connection {
  Fd fd;
  std::string peer;
  Stage stage = Stage::opening;
  Clock::time_point proof_due;
  wire::Opening opening;
  std::string nonce;  // ours, that the proof must hold
  std::string in, out;
  size_t sent = 0;       // of `out`
  bool blocked = false;  // waits for room to send the rest
  std::shared_ptr<KeySpace> space;
  int rank = -1;
  std::optional<std::string> wanted;  // the key a get() waits for
  bool closing = false;               // refused: close when the reason is written
  std::optional<std::string> end;     // why it is to be closed now, which only on_event() does
};

}  // namespace

class RendezvousServer::Impl {
 public:
  Impl(const std::string& token, const std::string& bind_address, const Expected& expected)
      : where_(parse_host_port(bind_address, "rendezvous")),
        token_(token),
        single_(expected.single),
        control_(std::make_shared<KeySpace>(kControlGeneration, 0, expected.nodes)),
        current_(std::make_unique<Generation>(0, expected.ranks, single_)) {
    if (token.empty() || token.size() > wire::kMaxToken) {
      throw ConfigError(format("rendezvous: the token has {} bytes, must have 1 to {}",
                               token.size(), wire::kMaxToken));
    }
    listener_ = bind_socket(where_);
    start_listening(listener_, where_);
    where_.port = port_of(listener_);
    address_ = where_.text();
    wake_ = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_.valid()) throw SystemError("eventfd", errno);
    poller_.watch(wake_.get(), EPOLLIN, [this] { run_calls(); });
    poller_.watch(listener_.get(), EPOLLIN, [this] { accept_some(); });
    thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }
  ~Impl() {
    thread_.request_stop();
    wake();
  }

  const std::string& address() const { return address_; }

  // Runs on the server's thread; returns when it has run.
  void call(std::function<void()> work) {
    std::packaged_task<void()> task(std::move(work));
    auto done = task.get_future();
    {
      const std::lock_guard lock(calls_mutex_);
      calls_.push_back(std::move(task));
    }
    wake();
    done.get();
  }

  void begin_generation(int64_t generation, int ranks) {
    std::vector<int> old;
    for (const auto& [fd, connection] : connections_) {
      if (connection.space && connection.space != control_) old.push_back(fd);
    }
    for (const int fd : old) forget(fd);
    current_ = std::make_unique<Generation>(generation, ranks, single_);
  }

  void mark_lost(const std::shared_ptr<KeySpace>& space, int rank, const std::string& how) {
    space->lose(rank);
    ask(space, {wire::Op::set, lost_key(rank), how});
    const char* const word = space == control_ ? "node" : "rank";
    const auto news = space->end_joining(format(
        "lost {} {} {} was lost before all {}s had joined: {}", rank, word, rank, word, how));
    if (news) ask(space, *news);
  }
  void mark_lost(int rank, const std::string& how) {
    current_->mark_gone(rank, how);
    for (const auto& space : current_->ahead_of(rank)) mark_lost(space, rank, how);
  }

  void wait_until_left(const Deadline& deadline) {
    std::unique_lock lock(over_mutex_);
    over_.wait_for(lock, deadline.left(), [this] { return is_over_; });
  }

 private:
  void serve(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const auto now = Clock::now();
      auto next = now + milliseconds{60'000};
      if (!unproven_.empty()) next = connections_.at(unproven_.front()).proof_due;
      if (accept_again_) next = std::min(next, *accept_again_);
      poller_.wait(std::max(milliseconds{0}, std::chrono::ceil<milliseconds>(next - now)));
      expire();
    }
  }

  void wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

  void run_calls() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
    std::vector<std::packaged_task<void()>> calls;
    {
      const std::lock_guard lock(calls_mutex_);
      calls.swap(calls_);
    }
    for (auto& task : calls) task();
  }

  void accept_some() {
    for (size_t i = 0; i < kMaxUnproven; ++i) {
      Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!fd.valid()) {
        if (errno == EMFILE && !unproven_.empty()) {
          evict("no descriptors are left");
          continue;
        }
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          // The connection stays in the queue; asking again at once would spin.
          poller_.change(listener_.get(), 0);
          accept_again_ = Clock::now() + milliseconds{100};
        }
        return;
      }
      if (unproven_.size() >= kMaxUnproven) evict("too many without a token");
      tune_connection(fd);
      const int number = fd.get();
      Connection& connection = connections_[number];
      connection.peer = peer_of(fd);
      connection.proof_due = Clock::now() + kProofTime;
      connection.fd = std::move(fd);
      unproven_.push_back(number);
      poller_.watch(number, EPOLLIN, [this, number] { on_event(number); });
    }
  }

  // The one that has had most time makes room: an honest client needs far less than a flood takes.
  // It sends its opening at once, so those that have not go first.
  void evict(const std::string& why) {
    const auto silent = std::find_if(unproven_.begin(), unproven_.end(), [this](int fd) {
      return connections_.at(fd).stage == Stage::opening;
    });
    refuse(silent == unproven_.end() ? unproven_.front() : *silent, why);
  }

  void expire() {
    const auto now = Clock::now();
    while (!unproven_.empty() && connections_.at(unproven_.front()).proof_due <= now) {
      refuse(unproven_.front(), "no token within 2 s");
    }
    if (accept_again_ && *accept_again_ <= now) {
      accept_again_.reset();
      poller_.change(listener_.get(), EPOLLIN);
    }
  }

  void on_event(int fd) {
    Connection& connection = connections_.at(fd);
    try {
      flush(connection);
      receive(connection);
    } catch (const std::exception& failure) {
      // No room for this client's bytes, or the like: the others continue.
      connection.end = failure.what();
    }
    if (!connection.end) return;
    if (connection.closing) return forget(fd);
    const std::string how = *connection.end;
    if (connection.stage != Stage::ready) return refuse(fd, how);
    const auto space = connection.space;
    const int rank = connection.rank;
    const bool said_goodbye = how.empty();
    forget(fd);
    if (rank < 0) return;
    if (said_goodbye) {
      leave(space, rank);
    } else {
      mark_lost(space, rank, how);
    }
    current_->forget_what_is_over();
    if (current_->is_over_or_broken()) {
      const std::lock_guard lock(over_mutex_);
      is_over_ = true;
      over_.notify_all();
    }
  }

  void leave(const std::shared_ptr<KeySpace>& space, int rank) {
    space->leave(rank);
    if (space == control_) return;
    const auto news =
        space->end_joining(format("lost {} rank {} left before all ranks had joined", rank, rank));
    if (news) ask(space, *news);
  }

  void receive(Connection& connection) {
    std::array<char, kReadSize> buffer;
    const size_t room = connection.closing ? buffer.size()
                        : connection.stage == Stage::opening
                            ? wire::kOpeningSize - connection.in.size()
                        : connection.stage == Stage::proof ? kHmacSize - connection.in.size()
                                                           : buffer.size();
    const ssize_t count = ::read(connection.fd.get(), buffer.data(), room);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count == 0) {
      connection.end = "connection closed";
    } else if (count < 0) {
      connection.end = format("connection closed: {}", std::strerror(errno));
    } else if (!connection.closing) {
      connection.in.append(buffer.data(), static_cast<size_t>(count));
      if (connection.stage == Stage::opening) {
        check_opening(connection);
      } else if (connection.stage == Stage::proof) {
        check_proof(connection);
      } else {
        work(connection);
      }
    }
  }

  void check_opening(Connection& connection) {
    if (!wire::opening_begins(connection.in)) {
      connection.end = "not a Lockstep client";
    } else if (connection.in.size() == wire::kOpeningSize) {
      const auto opening = wire::unpack_opening(connection.in);
      if (!opening)
        return turn_away(connection, wire::Status::refused, "another version of Lockstep");
      connection.in.clear();
      connection.opening = *opening;
      connection.nonce = wire::make_nonce();
      connection.stage = Stage::proof;
      say(connection, {wire::Status::ok, connection.nonce});
    }
  }

  void check_proof(Connection& connection) {
    if (connection.in.size() < kHmacSize) return;
    if (wire::same_bytes(connection.in,
                         wire::client_proof(token_, connection.opening, connection.nonce))) {
      connection.in.clear();
      return admit(connection);
    }
    say(connection, {wire::Status::refused, "wrong token, or the rendezvous of another job"});
    connection.end = "wrong token";
  }

  // Answers the requests that are complete. A client waits for each answer, so `out` holds one at
  // most.
  void work(Connection& connection) {
    while (connection.out.empty() && !connection.wanted && !connection.closing && !connection.end) {
      const auto length = wire::frame_length(connection.in);
      if (!length) return;
      if (*length > wire::kMaxFrame) {
        connection.end = format("it sent a frame of {} bytes", *length);
        return;
      }
      if (connection.in.size() < 4 + *length) return;
      const auto request = wire::parse_request(std::string_view(connection.in).substr(4, *length));
      connection.in.erase(0, 4 + *length);
      if (!request) {
        connection.end = "it sent a malformed frame";
      } else if (request->op == wire::Op::goodbye) {
        connection.end = "";
      } else {
        const wire::Reply reply = ask(connection.space, *request);
        if (request->op == wire::Op::get && reply.status == wire::Status::absent) {
          connection.wanted = request->key;
        } else {
          say(connection, reply);
        }
      }
    }
    if (connection.in.size() > 4 + wire::kMaxFrame) connection.end = "it does not wait for answers";
  }

  void turn_away(Connection& connection, wire::Status status, const std::string& reason) {
    connection.closing = true;
    say(connection, {status, reason});
  }

  void admit(Connection& connection) {
    unproven_.remove(connection.fd.get());
    const wire::Hello& hello = connection.opening.hello;
    const bool is_node = hello.generation == kControlGeneration;
    // A rank of an earlier generation has nothing to do with those who meet now.
    if (!is_node && hello.generation != current_->number()) {
      return turn_away(connection, wire::Status::refused,
                       format("rank {} belongs to generation {}, the job is in generation {}",
                              hello.rank, hello.generation, current_->number()));
    }
    const auto space = is_node ? control_ : current_->place_of(hello);
    if (!space && hello.rank < 0)
      return turn_away(connection, wire::Status::refused,
                       format("incarnation {} is over", hello.incarnation));
    if (!space) {
      return turn_away(connection, wire::Status::later,
                       format("rank {} has joined before, and rank 0 has not started the next "
                              "incarnation of the job",
                              hello.rank));
    }
    // A launcher that comes back before its end was noticed.
    if (is_node && space->is_decided() && space->is_present(hello.rank))
      return turn_away(connection, wire::Status::later,
                       format("node {} is already connected", hello.rank));
    if (!is_node) {
      for (const auto& [rank, how] : current_->gone()) mark_lost(space, rank, how);
    }
    const std::string reason = space->join(hello);
    if (!reason.empty()) {
      const auto news = space->end_joining("refused " + reason);
      if (news) ask(space, *news);
      return turn_away(connection, wire::Status::refused, reason);
    }
    connection.space = space;
    connection.rank = hello.rank;
    connection.stage = Stage::ready;
    say(connection,
        {wire::Status::ok, wire::pack(space->incarnation()) +
                               wire::server_proof(token_, connection.opening, connection.nonce,
                                                  space->incarnation())});
  }

  // Clients that wait for a key that was just set get it.
  wire::Reply ask(const std::shared_ptr<KeySpace>& space, const wire::Request& request) {
    wire::Reply reply = space->answer(request);
    if (request.op == wire::Op::set || request.op == wire::Op::add) {
      for (auto& [fd, connection] : connections_) {
        if (connection.space != space || connection.wanted != request.key) continue;
        const wire::Reply value = space->answer({wire::Op::find, request.key, {}});
        if (value.status != wire::Status::ok) break;
        connection.wanted.reset();
        say(connection, value);
      }
    }
    return reply;
  }

  void say(Connection& connection, const wire::Reply& reply) {
    connection.out = wire::frame(reply);
    flush(connection);
    if (connection.closing && connection.out.empty()) shutdown(connection.fd.get(), SHUT_WR);
  }

  // A failed send is left to the next read, which sees the same end: so nothing here ends a
  // connection while others are being walked.
  void flush(Connection& connection) {
    while (connection.sent < connection.out.size()) {
      const ssize_t count =
          send(connection.fd.get(), connection.out.data() + connection.sent,
               connection.out.size() - connection.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN) return watch_room(connection, true);
      if (count < 0) break;
      connection.sent += static_cast<size_t>(count);
    }
    connection.out.clear();
    connection.sent = 0;
    watch_room(connection, false);
  }

  void watch_room(Connection& connection, bool blocked) {
    if (std::exchange(connection.blocked, blocked) == blocked) return;
    poller_.change(connection.fd.get(), blocked ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }

  void refuse(int fd, const std::string& why) {
    const std::string peer = connections_.at(fd).peer;
    forget(fd);
    ++refused_;
    if (Clock::now() < refusal_report_due_) return;
    const std::string more = refused_ > 1 ? format(" ({} since the last report)", refused_) : "";
    log::warn(format("rendezvous {} refused {}: {}{}", address_, peer, why, more));
    refused_ = 0;
    refusal_report_due_ = Clock::now() + kRefusalReportEvery;
  }

  void forget(int fd) {
    poller_.forget(fd);
    unproven_.remove(fd);
    connections_.erase(fd);
  }

  HostPort where_;
  const std::string token_;
  std::string address_;
  Fd listener_, wake_;
  Poller poller_;
  std::map<int, Connection> connections_;
  std::list<int> unproven_;  // oldest first
  std::optional<Clock::time_point> accept_again_;
  const bool single_;
  const std::shared_ptr<KeySpace> control_;
  std::unique_ptr<Generation> current_;
  size_t refused_ = 0;
  Clock::time_point refusal_report_due_{};
  std::mutex calls_mutex_;
  std::vector<std::packaged_task<void()>> calls_;
  std::mutex over_mutex_;
  std::condition_variable over_;
  bool is_over_ = false;
  std::jthread thread_;  // last: ends before what it uses
};

RendezvousServer::RendezvousServer(const std::string& token, const std::string& bind_address)
    : RendezvousServer(token, bind_address, Expected{}) {}
RendezvousServer::RendezvousServer(const std::string& token, const std::string& bind_address,
                                   const Expected& expected)
    : impl_(std::make_unique<Impl>(token, bind_address, expected)) {}
RendezvousServer::~RendezvousServer() = default;

const std::string& RendezvousServer::address() const { return impl_->address(); }

void RendezvousServer::begin_generation(int64_t generation, int ranks) {
  impl_->call([&] { impl_->begin_generation(generation, ranks); });
}

void RendezvousServer::mark_lost(int rank, const std::string& how) {
  impl_->call([&] { impl_->mark_lost(rank, how); });
}

void RendezvousServer::wait_until_left(const Deadline& deadline) {
  impl_->wait_until_left(deadline);
}

}  // namespace lockstep::launch
