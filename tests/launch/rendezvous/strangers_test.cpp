// SPDX-License-Identifier: Apache-2.0
// Who is let in: proofs of the token, strangers of all kinds, and where tokens come from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/secret.h"
#include "tests/launch/rendezvous/support.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::launch {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Rendezvous, AWrongTokenIsRefused) {
  RendezvousServer server(kToken);
  for (const std::string& token :
       {std::string("0123456789abcdeF"), std::string("x"), kToken + "0"}) {
    EXPECT_THAT(message_of<ConfigError>([&] {
                  RendezvousClient(server.address(), token, {0, 1, 0}, in(20'000));
                }),
                HasSubstr("token"));
  }
  EXPECT_THROW(RendezvousClient(server.address(), "", {0, 1, 0}, in(20'000)), ConfigError);
  EXPECT_THROW(RendezvousServer(""), ConfigError);
  EXPECT_THROW(RendezvousServer(std::string(wire::kMaxToken + 1, 'x')), ConfigError);
  EXPECT_NO_THROW(client(server, 0, 1));
}

TEST(Rendezvous, StrangersAreClosedWithoutAWord) {
  RendezvousServer server(kToken);
  auto good = client(server, 0, 1);
  const std::string strange[] = {"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                 std::string(1, '\x16') + "\x03\x01tls",
                                 std::string(100'000, '\xff'), std::string(1'000, '\0')};
  for (const std::string& bytes : strange) {
    EXPECT_EQ(bytes_until_closed(raw(server, bytes)), 0u);
    EXPECT_EQ(good.add("count", 1) > 0, true);
  }
}

TEST(Rendezvous, SlowStrangersLoseTheirSeatAndDisturbNobody) {
  RendezvousServer server(kToken);
  auto good = client(server, 0, 2);
  std::vector<Fd> slow;
  for (int i = 0; i < 300; ++i) slow.push_back(raw(server, i % 2 == 0 ? "" : "LOCK"));
  const auto start = Clock::now();
  for (int i = 0; i < 100; ++i) good.add("count", 1);
  auto late = client(server, 1, 2);  // a newcomer gets in too
  EXPECT_EQ(late.find("count"), "100");
  EXPECT_LT(seconds_since(start), 2.0);
  for (const Fd& fd : slow) EXPECT_EQ(bytes_until_closed(fd), 0u);
  EXPECT_LT(seconds_since(start), 15.0);
}

TEST(Rendezvous, FramesThatLieEndTheConnectionOnly) {
  RendezvousServer server(kToken);
  auto good = client(server, 0, 1);
  const std::string frames[] = {
      std::string("\xff\xff\xff\xff", 4),                         // 4 GiB
      std::string("\x00\x00\x00\x00", 4),                         // nothing
      std::string("\x06\x00\x00\x00\x02\xff\xff\xff\x7f z", 11),  // a key longer than its frame
      std::string("\x05\x00\x00\x00\x63\x00\x00\x00\x00", 9),     // an unknown operation
  };
  for (const std::string& frame : frames) {
    // Once instead of a proof, once after a proper one.
    const Stranger early(server, {});
    write_bytes(early.fd, frame);
    shutdown(early.fd.get(), SHUT_WR);
    bytes_until_closed(early.fd);
    const Fd fd = joined(server, {});
    write_bytes(fd, frame);
    shutdown(fd.get(), SHUT_WR);
    bytes_until_closed(fd);
    EXPECT_NO_THROW(good.add("count", 1));
  }
}

TEST(Rendezvous, HmacIsThatOfTheStandard) {
  std::string text;
  for (const char byte : hmac_sha256("Jefe", "what do ya want for nothing?"))
    text += format("{:02x}", static_cast<unsigned char>(byte));
  EXPECT_EQ(text, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");  // RFC 4231
}

TEST(Rendezvous, AProofIsForOneClientAndOneConnection) {
  RendezvousServer server(kToken);
  const auto refused = [](const Fd& fd) {
    return read_bytes(fd, 5)[4] == static_cast<char>(wire::Status::refused);
  };
  const Stranger first(server, {0, 2, 0}), other(server, {1, 2, 0});
  // Of another connection, of another rank, of another token.
  write_bytes(first.fd, wire::client_proof(kToken, other.opening, other.nonce));
  EXPECT_TRUE(refused(first.fd));
  wire::Opening changed = other.opening;
  changed.hello.rank = 0;
  write_bytes(other.fd, wire::client_proof(kToken, changed, other.nonce));
  EXPECT_TRUE(refused(other.fd));
  const Stranger third(server, {1, 2, 0});
  write_bytes(third.fd, wire::client_proof("another", third.opening, third.nonce));
  EXPECT_TRUE(refused(third.fd));
  EXPECT_NO_THROW(client(server, 0, 2));
}

// Stands between one client and a server, and keeps what they say.
class Listener {
 public:
  explicit Listener(const std::string& server)
      : socket_(bind_socket({"127.0.0.1", 0})), address_{"127.0.0.1", port_of(socket_)} {
    start_listening(socket_, address_);
    thread_ = std::jthread([this, server](const std::stop_token& stop) {
      // A client that was not answered in time connects again.
      while (!stop.stop_requested()) {
        pollfd waiting{socket_.get(), POLLIN, 0};
        if (poll(&waiting, 1, 10) <= 0) continue;
        try {
          relay(server);
        } catch (const Error&) {  // one of them has gone
        }
      }
    });
  }
  std::string address() const { return address_.text(); }
  std::string heard() {
    thread_ = {};
    return heard_;
  }

 private:
  // One connection, until one of the two closes it.
  void relay(const std::string& server) {
    const Fd client(accept4(socket_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    const Fd other = connect_socket({parse_host_port(server, "test")}, in(20'000));
    pollfd ends[] = {{client.get(), POLLIN, 0}, {other.get(), POLLIN, 0}};
    while (poll(ends, 2, 20'000) > 0) {
      for (const int from : {0, 1}) {
        char bytes[4096];
        const ssize_t count = ends[from].revents == 0 ? -1 : read(ends[from].fd, bytes, 4096);
        if (count == 0) return;
        if (count < 0) continue;
        heard_.append(bytes, static_cast<size_t>(count));
        write_full(from == 0 ? other : client,
                   std::as_bytes(std::span(bytes, static_cast<size_t>(count))), in(20'000));
      }
    }
  }

  Fd socket_;
  HostPort address_;
  std::string heard_;
  std::jthread thread_;
};

TEST(Rendezvous, TheTokenIsNeverSent) {
  RendezvousServer server(kToken);
  Listener listener(server.address());
  {
    RendezvousClient one(listener.address(), kToken, {0, 1, 0}, in(20'000));
    one.set("key", "a value in the open");
  }
  const std::string heard = listener.heard();
  EXPECT_THAT(heard, HasSubstr("a value in the open"));
  EXPECT_THAT(heard, Not(HasSubstr(kToken)));
}

TEST(Rendezvous, AServerThatDoesNotKnowTheTokenIsFoundOut) {
  const Fd socket = bind_socket({"127.0.0.1", 0});
  const HostPort address{"127.0.0.1", port_of(socket)};
  start_listening(socket, address);
  const std::jthread server([&] {
    pollfd waiting{socket.get(), POLLIN, 0};
    poll(&waiting, 1, 20'000);
    const Fd client(accept4(socket.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    read_bytes(client, wire::kOpeningSize);
    write_bytes(client, wire::frame(wire::Reply{wire::Status::ok, wire::make_nonce()}));
    const std::string proof = read_bytes(client, kHmacSize);
    // The client's own proof is of no use.
    write_bytes(client, wire::frame(wire::Reply{wire::Status::ok, wire::pack(int64_t{0}) + proof}));
    bytes_until_closed(client);
  });
  EXPECT_THAT(message_of<ConfigError>([&] {
                RendezvousClient(address.text(), kToken, {0, 1, 0}, in(20'000));
              }),
              says("job's token"));
}

TEST(Rendezvous, AThousandStrangersNeitherDelayNorEndARendezvous) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 8192);
  setrlimit(RLIMIT_NOFILE, &files);
  RendezvousServer server(kToken);
  auto first = client(server, 0, 4);
  std::vector<Fd> strangers;
  const std::string kinds[] = {"", "LOCK", wire::pack(wire::Opening{wire::make_nonce(), {}}),
                               std::string(4096, 'x')};
  std::vector<std::unique_ptr<RendezvousClient>> ranks;
  for (int i = 0; i < 1000; ++i) {
    strangers.push_back(connect_socket({parse_host_port(server.address(), "test")}, in(20'000)));
    try {
      write_bytes(strangers.back(), kinds[i % 4]);
    } catch (const SystemError&) {  // closed already
    }
    if (i % 250 == 249 && i < 999) {
      ranks.push_back(std::make_unique<RendezvousClient>(server.address(), kToken,
                                                         Identity{1 + i / 250, 4, 0}, in(20'000)));
      if (ranks.back()->add("came", 1) == 3) ranks.back()->set("all", "yes");
    }
  }
  EXPECT_EQ(first.get("all", in(20'000)), "yes");
}

TEST(Token, IsLongAndNeverTheSame) {
  EXPECT_EQ(make_token().size(), 64u);
  EXPECT_NE(make_token(), make_token());
}

TEST(Token, ComesFromTheDescriptorAsOftenAsAsked) {
  const Fd fd = token_descriptor("secret");
  setenv("LOCKSTEP_TOKEN_FD", std::to_string(fd.get()).c_str(), 1);
  setenv("LOCKSTEP_TOKEN", "other", 1);
  EXPECT_EQ(token_from_environment(), "secret");
  EXPECT_EQ(token_from_environment(), "secret");
  setenv("LOCKSTEP_TOKEN_FD", "99999", 1);
  EXPECT_THAT(message_of<ConfigError>([] { token_from_environment(); }), HasSubstr("99999"));
  setenv("LOCKSTEP_TOKEN_FD", "nonsense", 1);
  EXPECT_THROW(token_from_environment(), ConfigError);
  unsetenv("LOCKSTEP_TOKEN_FD");
  EXPECT_EQ(token_from_environment(), "other");
  unsetenv("LOCKSTEP_TOKEN");
  EXPECT_EQ(token_from_environment(), "");
}

TEST(Token, ASecretComesFromAFileThatTheEnvironmentNames) {
  const test::TempDir dir;
  const std::string path = dir.path() + "/secret";
  test::write_file(path, "of the file\n");
  setenv("LOCKSTEP_TOKEN", "of the variable", 1);
  setenv("LOCKSTEP_TOKEN_FILE", path.c_str(), 1);
  EXPECT_EQ(token_from_environment(), "of the file");
  test::write_file(path, "of the file\n", 0640);
  const auto why = message_of<ConfigError>([] { token_from_environment(); });
  EXPECT_THAT(why, HasSubstr("0640"));
  EXPECT_THAT(why, HasSubstr("chmod 600"));
  unsetenv("LOCKSTEP_TOKEN_FILE");
  unsetenv("LOCKSTEP_TOKEN");
}

TEST(Token, IsAnotherForEachJob) {
  EXPECT_EQ(token_for_job("secret", "1.0"), token_for_job("secret", "1.0"));
  EXPECT_NE(token_for_job("secret", "1.0"), token_for_job("secret", "1.1"));
  EXPECT_NE(token_for_job("secret", "1.0"), token_for_job("other", "1.0"));
  EXPECT_EQ(token_for_job("", "").size(), 64u);
}

TEST(Token, FilesMustBePrivate) {
  const test::TempDir dir;
  const std::string path = dir.path() + "/token";
  test::write_file(path, "secret\nmore\n");
  EXPECT_EQ(token_from_file(path), "secret");
  test::write_file(path, "secret", 0644);
  EXPECT_THAT(message_of<ConfigError>([&] { token_from_file(path); }), HasSubstr("chmod 600"));
  test::write_file(path, "\n");
  EXPECT_THROW(token_from_file(path), ConfigError);
  EXPECT_THROW(token_from_file(dir.path()), ConfigError);
  EXPECT_THROW(token_from_file(dir.path() + "/none"), ConfigError);
}

}  // namespace
}  // namespace lockstep::launch
