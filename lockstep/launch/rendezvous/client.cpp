// SPDX-License-Identifier: Apache-2.0
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/rendezvous.h"
#include "lockstep/launch/rendezvous/socket.h"
#include "lockstep/launch/rendezvous/wire.h"

namespace lockstep::launch {
namespace {

constexpr milliseconds kLookInterval{200};     // at whether the server is still there
constexpr size_t kMaxIntroduction = 4u << 10;  // of what comes from a server before its proof

// Nothing at a clean end of the connection.
std::optional<wire::Reply> receive(const Fd& fd, const Deadline& deadline,
                                   size_t limit = wire::kMaxFrame) {
  std::string bytes(4, '\0');
  if (!read_full(fd, std::as_writable_bytes(std::span(bytes)), deadline)) return std::nullopt;
  const uint32_t length = wire::frame_length(bytes).value();
  if (length == 0 || length > limit) throw CommError("the answer is not a frame");
  bytes.resize(length);
  if (!read_full(fd, std::as_writable_bytes(std::span(bytes)), deadline)) return std::nullopt;
  auto reply = wire::parse_reply(bytes);
  if (!reply) throw CommError("the answer is malformed");
  return reply;
}

void send_bytes(const Fd& fd, const std::string& bytes, const Deadline& deadline) {
  write_full(fd, std::as_bytes(std::span(bytes)), deadline);
}

}  // namespace

class RendezvousClient::Impl {
 public:
  Impl(const std::string& address, const std::string& token, const Identity& identity,
       const Deadline& deadline, Clock::time_point start)
      : where_(address),
        places_(parse_host_ports(address, "rendezvous")),
        token_(token),
        identity_(identity) {
    if (token.empty() || token.size() > wire::kMaxToken) {
      throw ConfigError(format("rendezvous {}: the token has {} bytes, must have 1 to {}", address,
                               token.size(), wire::kMaxToken));
    }
    main_ = join(identity_, deadline, deadline, start);
    local_ = host_of(main_);
    server_ = peer_host_of(main_);
  }

  ~Impl() {
    if (!main_.valid()) return;
    const std::string bytes = wire::frame(wire::Request{wire::Op::goodbye, {}, {}});
    // Best effort: a server that cannot take it now sees the connection end instead.
    [[maybe_unused]] const ssize_t sent =
        ::send(main_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  wire::Reply ask(const wire::Request& request) {
    check_sizes(request);
    const std::lock_guard lock(mutex_);
    if (!main_.valid()) throw CommError(describe(request, "the connection was lost before"));
    return exchange(main_, request, Deadline(kDefaultTimeout));
  }

  // On a connection that no other thread uses meanwhile.
  std::string wait_for(const std::string& key, const Deadline& deadline) {
    const wire::Request request{wire::Op::get, key, {}};
    check_sizes(request);
    try {
      Fd fd = take_idle();
      if (!fd.valid()) {
        Identity helper{-1, 0, identity_.generation, identity_.incarnation};
        fd = join_again(helper, deadline);
      }
      wire::Reply reply = exchange(fd, request, deadline);
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(fd));
      return std::move(reply.value);
    } catch (const TimeoutError&) {
      throw TimeoutError(format("no rank set '{}' before the deadline", key));
    }
  }

  const std::string& local_address() const { return local_; }
  const std::string& server_address() const { return server_; }

 private:
  std::string describe(const wire::Request& request, const std::string& what) const {
    return format("rendezvous {}: '{}': {}", where_, request.key, what);
  }

  void check_sizes(const wire::Request& request) const {
    if (request.key.size() > wire::kMaxKey || request.value.size() > wire::kMaxValue) {
      throw ConfigError(
          format("rendezvous: a key of {} and a value of {} bytes; the limits are {} and {}",
                 request.key.size(), request.value.size(), wire::kMaxKey, wire::kMaxValue));
    }
  }

  Fd take_idle() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return {};
    Fd fd = std::move(idle_.back());
    idle_.pop_back();
    return fd;
  }

  // After anything but an answer the two sides may be out of step, so the connection is closed.
  wire::Reply exchange(Fd& fd, const wire::Request& request, const Deadline& deadline) {
    try {
      send_bytes(fd, wire::frame(request), deadline);
      auto reply = receive(fd, deadline);
      if (!reply) throw CommError("the server closed the connection");
      if (reply->status == wire::Status::refused)
        throw ConfigError(describe(request, reply->value));
      return std::move(*reply);
    } catch (const ConfigError&) {
      throw;
    } catch (const TimeoutError&) {
      fd = Fd();
      throw TimeoutError(describe(request, "no answer before the deadline"));
    } catch (const Error& failure) {
      fd = Fd();
      throw CommError(describe(request, failure.what()));
    }
  }

  // Any service may be at a port that was mistyped.
  std::optional<wire::Reply> receive_introduction(const Fd& fd, const Deadline& deadline) const {
    try {
      return receive(fd, deadline, kMaxIntroduction);
    } catch (const TimeoutError&) {
      throw;
    } catch (const CommError&) {
      throw CommError(
          format("{} answers, but not as a rendezvous of Lockstep; check the port", where_));
    }
  }

  // Shows that this client knows the token, and asks the server for the same. Nothing where it
  // closes the connection.
  std::optional<wire::Reply> introduce(const Fd& fd, Identity& identity, const Deadline& deadline) {
    const wire::Opening opening{
        wire::make_nonce(),
        {identity.rank, identity.world_size, identity.generation, identity.incarnation}};
    send_bytes(fd, wire::pack(opening), deadline);
    const auto challenge = receive_introduction(fd, deadline);
    if (!challenge) return std::nullopt;
    require_ok(*challenge);
    send_bytes(fd, wire::client_proof(token_, opening, challenge->value), deadline);
    auto joined = receive_introduction(fd, deadline);
    if (!joined || joined->status == wire::Status::later) return joined;
    require_ok(*joined);
    const std::string_view answer = joined->value;
    const auto incarnation = wire::unpack_number(answer.substr(0, 8));
    if (!incarnation ||
        !wire::same_bytes(answer.substr(8),
                          wire::server_proof(token_, opening, challenge->value, *incarnation))) {
      throw ConfigError(format(
          "rendezvous {}: the server does not know the job's token; it may belong to another job",
          where_));
    }
    identity.incarnation = *incarnation;
    return joined;
  }

  // A connection that broke before the server answered may have met a server that is full or just
  // starting, and one that says so is of an incarnation before this one: try again. A rank learns
  // its incarnation.
  Fd join(Identity& identity, const Deadline& deadline, const Deadline& connected,
          Clock::time_point start) {
    std::optional<std::string> told;
    const auto late = [&](const char* otherwise) {
      if (told) return TimeoutError(format("rendezvous {}: {}", where_, *told));
      return TimeoutError(
          format("{} {} in {:.1f} s; check the port", where_, otherwise, seconds_since(start)));
    };
    while (true) {
      Fd fd;
      try {
        fd = connect_socket(places_, connected, start);
        const auto joined = introduce(fd, identity, deadline);
        if (joined && joined->status == wire::Status::later) {
          told = joined->value;
        } else if (joined) {
          return fd;
        }
      } catch (const SystemError&) {
      } catch (const TimeoutError&) {
        if (!fd.valid() && !told) throw;  // it says where nothing answers
        throw late("has not answered as a rendezvous of Lockstep");
      }
      if (deadline.passed()) throw late("has closed every connection");
      std::this_thread::sleep_for(std::min(milliseconds{20}, deadline.left()));
    }
  }

  // The server of a job is never started again: one that has ended is an error at once, not at the
  // deadline.
  Fd join_again(Identity& identity, const Deadline& deadline) {
    const auto start = Clock::now();
    while (true) {
      try {
        return join(identity, deadline, Deadline(std::min(kLookInterval, deadline.left())), start);
      } catch (const TimeoutError&) {
        if (deadline.passed()) throw;
      }
      const std::lock_guard lock(mutex_);
      char byte;
      const ssize_t got =
          main_.valid() ? ::recv(main_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) : 0;
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
        throw CommError(format("rendezvous {}: the server closed the connection", where_));
    }
  }

  void require_ok(const wire::Reply& reply) const {
    if (reply.status == wire::Status::ok) return;
    throw ConfigError(format("rendezvous {}: {}", where_, reply.value));
  }

  const std::string where_;
  const std::vector<HostPort> places_;
  const std::string token_;
  Identity identity_;
  std::string local_, server_;
  std::mutex mutex_;
  Fd main_;               // says that this rank lives
  std::vector<Fd> idle_;  // for waiting
};

RendezvousClient::RendezvousClient(const std::string& address, const std::string& token,
                                   const Identity& identity, const Deadline& deadline,
                                   Clock::time_point start)
    : impl_(std::make_unique<Impl>(address, token, identity, deadline, start)) {}
RendezvousClient::~RendezvousClient() = default;

std::string RendezvousClient::local_address() const { return impl_->local_address(); }
std::string RendezvousClient::server_address() const { return impl_->server_address(); }

void RendezvousClient::set(const std::string& key, const std::string& value) {
  impl_->ask({wire::Op::set, key, value});
}

std::string RendezvousClient::get(const std::string& key, const Deadline& deadline) {
  if (auto value = find(key)) return std::move(*value);
  return impl_->wait_for(key, deadline);
}

std::optional<std::string> RendezvousClient::find(const std::string& key) {
  wire::Reply reply = impl_->ask({wire::Op::find, key, {}});
  if (reply.status == wire::Status::absent) return std::nullopt;
  return std::move(reply.value);
}

int64_t RendezvousClient::add(const std::string& key, int64_t amount) {
  const auto sum = wire::unpack_number(impl_->ask({wire::Op::add, key, wire::pack(amount)}).value);
  if (!sum) throw CommError("rendezvous: the answer to add is not a number");
  return *sum;
}

bool RendezvousClient::remove(const std::string& key) {
  return impl_->ask({wire::Op::remove, key, {}}).status == wire::Status::ok;
}

std::unique_ptr<RendezvousClient> connect_from_environment(int rank, int world_size,
                                                           const Deadline& deadline) {
  const char* const address = std::getenv("LOCKSTEP_RENDEZVOUS");
  if (address == nullptr || *address == '\0') {
    throw ConfigError(
        "environment: LOCKSTEP_RENDEZVOUS is not set; start the program with lockstep run");
  }
  const std::string token = token_from_environment();
  if (token.empty()) {
    throw ConfigError(
        "environment: none of LOCKSTEP_TOKEN_FD, LOCKSTEP_TOKEN_FILE and LOCKSTEP_TOKEN holds the "
        "job's token");
  }
  int64_t generation = 0;
  if (const char* const number = std::getenv("LOCKSTEP_GENERATION")) {
    const std::string_view text(number);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), generation);
    if (error != std::errc() || end != text.data() + text.size() || generation < 0) {
      throw ConfigError(format("environment: LOCKSTEP_GENERATION={} is not a whole number", text));
    }
  }
  return std::make_unique<RendezvousClient>(address, token, Identity{rank, world_size, generation},
                                            deadline);
}

}  // namespace lockstep::launch
