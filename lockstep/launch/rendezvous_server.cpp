// One thread owns all state; other threads hand it functions to run (call()). A connection passes three stages: it must
// show the token, then say who it is, then it may ask. Until the token is shown it costs one small buffer, one of a few
// seats, and two seconds at most.
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/launch/poller.h"
#include "lockstep/launch/rendezvous.h"
#include "lockstep/launch/socket.h"
#include "lockstep/launch/wire.h"

namespace lockstep::launch {
namespace {

constexpr size_t kMaxUnproven = 64;
constexpr milliseconds kProofTime{2'000};
constexpr milliseconds kRefusalReportEvery{5'000};
constexpr size_t kReadSize = 64u << 10;

// What one generation of ranks shares.
struct Space {
  explicit Space(int64_t number) : generation(number) {}
  const int64_t generation;
  LocalStore store;
  int world_size = 0;  // 0 until the first rank says it
  std::set<int> present, lost;
};

enum class Stage { greeting, hello, ready };

struct Connection {
  Fd fd;
  std::string peer;
  Stage stage = Stage::greeting;
  Clock::time_point proof_due;
  std::string in, out;
  size_t sent = 0;       // of `out`
  bool blocked = false;  // waits for room to send the rest
  std::shared_ptr<Space> space;
  int rank = -1;
  std::optional<std::string> wanted;  // the key a get() waits for
  bool closing = false;               // refused: close when the reason is written
};

}  // namespace

class RendezvousServer::Impl {
 public:
  Impl(const std::string& token, const std::string& bind_address)
      : where_(parse_host_port(bind_address, "rendezvous")) {
    if (token.empty() || token.size() > wire::kMaxToken) {
      throw ConfigError(format("rendezvous: the token has {} bytes, must have 1 to {}", token.size(),
                               wire::kMaxToken));
    }
    greeting_ = wire::greeting(token);
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

  void begin_generation(int64_t generation) {
    std::vector<int> old;
    for (const auto& [fd, connection] : connections_) {
      if (connection.space == current_) old.push_back(fd);
    }
    for (const int fd : old) forget(fd);
    current_ = std::make_shared<Space>(generation);
  }

  void mark_lost(Space& space, int rank, const std::string& how) {
    space.lost.insert(rank);
    space.present.erase(rank);
    store_and_wake(space, lost_key(rank), how);
  }
  void mark_lost(int rank, const std::string& how) { mark_lost(*current_, rank, how); }

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
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          // The connection stays in the queue; asking again at once would spin.
          poller_.change(listener_.get(), 0);
          accept_again_ = Clock::now() + milliseconds{100};
        }
        return;
      }
      // The one that has had most time makes room: an honest client needs far less than a flood takes.
      if (unproven_.size() >= kMaxUnproven) refuse(unproven_.front(), "too many without a token");
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
    try {
      Connection& connection = connections_.at(fd);
      flush(connection);
      if (connection.closing && connection.out.empty()) return forget(fd);
      receive(fd, connection);
    } catch (const std::exception& failure) {
      // No room for this client's bytes, or the like: the others go on.
      end(fd, failure.what());
    }
  }

  void receive(int fd, Connection& connection) {
    std::array<char, kReadSize> buffer;
    const size_t room = connection.stage == Stage::greeting
                            ? wire::kGreetingSize - connection.in.size()
                            : buffer.size();
    const ssize_t count = ::read(fd, buffer.data(), room);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) return end(fd, count == 0 ? "connection closed" : std::strerror(errno));
    connection.in.append(buffer.data(), static_cast<size_t>(count));
    if (connection.stage == Stage::greeting) {
      check_greeting(fd, connection);
    } else {
      work(fd, connection);
    }
  }

  void check_greeting(int fd, Connection& connection) {
    if (!wire::greeting_begins(connection.in)) return refuse(fd, "not a Lockstep client");
    if (connection.in.size() < wire::kGreetingSize) return;
    if (!wire::same_bytes(connection.in, greeting_)) {
      say(connection, {wire::Status::refused, "wrong token, or another version of Lockstep"});
      return refuse(fd, "wrong token");
    }
    connection.in.clear();
    connection.stage = Stage::hello;
    say(connection, {wire::Status::ok, {}});
  }

  // Answers the requests that are complete. A client waits for each answer, so `out` holds one at most.
  void work(int fd, Connection& connection) {
    while (connection.out.empty() && !connection.wanted && !connection.closing) {
      const auto length = wire::frame_length(connection.in);
      if (!length) return;
      const size_t limit =
          connection.stage == Stage::ready ? wire::kMaxFrame : wire::kMaxHelloFrame;
      if (*length > limit) return end(fd, format("it sent a frame of {} bytes", *length));
      if (connection.in.size() < 4 + *length) return;
      const auto request = wire::parse_request(std::string_view(connection.in).substr(4, *length));
      connection.in.erase(0, 4 + *length);
      if (!request) return end(fd, "it sent a malformed frame");
      if (connection.stage == Stage::hello) {
        greet(fd, connection, *request);
      } else if (request->op == wire::Op::goodbye) {
        return leave(fd, connection);
      } else {
        answer(connection, *request);
      }
    }
    if (connection.in.size() > 4 + wire::kMaxFrame) end(fd, "it does not wait for answers");
  }

  void greet(int fd, Connection& connection, const wire::Request& request) {
    const auto hello = wire::unpack_hello(request.value);
    if (request.op != wire::Op::hello || !hello) return refuse(fd, "no hello after the token");
    unproven_.remove(fd);
    const std::string reason = join(connection, *hello);
    if (!reason.empty()) {
      connection.closing = true;
      return say(connection, {wire::Status::refused, reason});
    }
    connection.stage = Stage::ready;
    say(connection, {wire::Status::ok, {}});
  }

  // Empty when the client is let in, otherwise why it is not.
  std::string join(Connection& connection, const wire::Hello& hello) {
    const bool control = hello.generation == kControlGeneration;
    const std::shared_ptr<Space>& space = control ? control_ : current_;
    const char* const word = control ? "node" : "rank";
    if (hello.generation != space->generation) {
      return format("rank {} belongs to generation {}, the job is in generation {}", hello.rank,
                    hello.generation, space->generation);
    }
    if (hello.rank >= 0) {
      if (hello.rank >= hello.world_size) {
        return format("{} {} is outside its world of {}", word, hello.rank, hello.world_size);
      }
      if (space->world_size != 0 && space->world_size != hello.world_size) {
        return format("{} {} counts {} {}s in all, the others count {}", word, hello.rank,
                      hello.world_size, word, space->world_size);
      }
      if (space->present.contains(hello.rank)) {
        return format("{} {} is already connected: two processes have the same number", word,
                      hello.rank);
      }
      if (space->lost.contains(hello.rank)) {
        return format("{} {} was lost in this generation and may not come back", word, hello.rank);
      }
      space->world_size = hello.world_size;
      space->present.insert(hello.rank);
    }
    connection.space = space;
    connection.rank = hello.rank;
    return {};
  }

  void answer(Connection& connection, const wire::Request& request) {
    Space& space = *connection.space;
    try {
      switch (request.op) {
        case wire::Op::set:
          store_and_wake(space, request.key, request.value);
          return say(connection, {wire::Status::ok, {}});
        case wire::Op::add: {
          const auto amount = wire::unpack_number(request.value);
          if (!amount) throw ConfigError("add: not a number");
          const int64_t sum = space.store.add(request.key, *amount);
          wake_waiting(space, request.key, std::to_string(sum));
          return say(connection, {wire::Status::ok, wire::pack(sum)});
        }
        case wire::Op::remove:
          return say(connection, {space.store.remove(request.key) ? wire::Status::ok
                                                                  : wire::Status::absent,
                                  {}});
        case wire::Op::get:
        case wire::Op::find: {
          auto value = space.store.find(request.key);
          if (value) return say(connection, {wire::Status::ok, std::move(*value)});
          if (request.op == wire::Op::find) return say(connection, {wire::Status::absent, {}});
          connection.wanted = request.key;
          return;
        }
        case wire::Op::hello:
        case wire::Op::goodbye: throw ConfigError("said hello twice");
      }
    } catch (const Error& failure) {
      say(connection, {wire::Status::refused, failure.what()});
    }
  }

  void store_and_wake(Space& space, const std::string& key, const std::string& value) {
    space.store.set(key, value);
    wake_waiting(space, key, value);
  }

  void wake_waiting(const Space& space, const std::string& key, const std::string& value) {
    for (auto& [fd, connection] : connections_) {
      if (connection.space.get() != &space || connection.wanted != key) continue;
      connection.wanted.reset();
      say(connection, {wire::Status::ok, value});
    }
  }

  void say(Connection& connection, const wire::Reply& reply) {
    connection.out = wire::frame(reply);
    flush(connection);
    if (connection.closing && connection.out.empty()) shutdown(connection.fd.get(), SHUT_WR);
  }

  // A failed send is left to the next read, which sees the same end: so nothing here ends a connection while others
  // are being walked.
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

  // The client went away or broke the rules; a rank that does so is lost.
  void end(int fd, const std::string& how) {
    const Connection& connection = connections_.at(fd);
    if (connection.stage != Stage::ready) return refuse(fd, how);
    const auto space = connection.space;
    const int rank = connection.rank;
    forget(fd);
    if (rank >= 0) mark_lost(*space, rank, how);
  }

  void leave(int fd, const Connection& connection) {
    if (connection.rank >= 0) connection.space->present.erase(connection.rank);
    forget(fd);
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
  std::string address_, greeting_;
  Fd listener_, wake_;
  Poller poller_;
  std::map<int, Connection> connections_;
  std::list<int> unproven_;  // oldest first
  std::optional<Clock::time_point> accept_again_;
  std::shared_ptr<Space> control_ = std::make_shared<Space>(kControlGeneration);
  std::shared_ptr<Space> current_ = std::make_shared<Space>(0);
  size_t refused_ = 0;
  Clock::time_point refusal_report_due_{};
  std::mutex calls_mutex_;
  std::vector<std::packaged_task<void()>> calls_;
  std::jthread thread_;  // last: ends before what it uses
};

RendezvousServer::RendezvousServer(const std::string& token, const std::string& bind_address)
    : impl_(std::make_unique<Impl>(token, bind_address)) {}
RendezvousServer::~RendezvousServer() = default;

const std::string& RendezvousServer::address() const { return impl_->address(); }

void RendezvousServer::begin_generation(int64_t generation) {
  impl_->call([&] { impl_->begin_generation(generation); });
}

void RendezvousServer::mark_lost(int rank, const std::string& how) {
  impl_->call([&] { impl_->mark_lost(rank, how); });
}

}  // namespace lockstep::launch
