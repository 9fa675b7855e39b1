#include "lockstep/launch/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <future>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/launch/socket.h"
#include "lockstep/launch/wire.h"
#include "tests/support/subprocess.h"

namespace lockstep::launch {
namespace {

using ::testing::HasSubstr;

const std::string kToken = "0123456789abcdef";

Deadline in(int ms) { return Deadline(milliseconds{ms}); }

RendezvousClient client(const RendezvousServer& server, int rank = -1, int world_size = 0,
                        int64_t generation = 0) {
  return {server.address(), kToken, {rank, world_size, generation}, in(20'000)};
}

template <class Exception, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Exception& failure) {
    return failure.what();
  }
  ADD_FAILURE() << "no exception of the expected type";
  return {};
}

// A connection that knows nothing of the protocol.
Fd raw(const RendezvousServer& server, const std::string& bytes) {
  Fd fd = connect_socket({parse_host_port(server.address(), "test")}, in(20'000));
  write_full(fd, std::as_bytes(std::span(bytes)), in(20'000));
  return fd;
}

// A client that ends without a good-bye.
Fd joined(const RendezvousServer& server, const wire::Hello& hello) {
  Fd fd = raw(server, wire::greeting(kToken) +
                          wire::frame(wire::Request{wire::Op::hello, {}, wire::pack(hello)}));
  std::array<std::byte, 5 + 5 + 8> answers;
  EXPECT_TRUE(read_full(fd, answers, in(20'000)));
  return fd;
}

// How many bytes come before the server closes the connection.
size_t bytes_until_closed(const Fd& fd) {
  size_t total = 0;
  std::byte byte{};
  try {
    while (read_full(fd, std::span(&byte, 1), in(20'000))) ++total;
  } catch (const SystemError&) {  // a reset is an end too
  }
  return total;
}

TEST(Rendezvous, StoresAndFinds) {
  RendezvousServer server(kToken);
  auto a = client(server, 0, 2), b = client(server, 1, 2);
  a.set("key", "value");
  EXPECT_EQ(b.get("key", in(20'000)), "value");
  EXPECT_EQ(b.find("key"), "value");
  EXPECT_EQ(b.find("other"), std::nullopt);
  EXPECT_EQ(a.add("count", 2), 2);
  EXPECT_EQ(b.add("count", -5), -3);
  EXPECT_EQ(a.get("count", in(20'000)), "-3");
  EXPECT_TRUE(a.remove("key"));
  EXPECT_FALSE(b.remove("key"));
  EXPECT_EQ(b.find("key"), std::nullopt);
  a.set("", std::string("\0binary\xff", 8));
  EXPECT_EQ(b.find(""), std::string("\0binary\xff", 8));
}

TEST(Rendezvous, WaitsUntilAKeyIsSetWithoutHoldingUpOtherCalls) {
  RendezvousServer server(kToken);
  auto shared = client(server, 0, 2), other = client(server, 1, 2);
  std::vector<std::future<std::string>> waiting;
  for (int i = 0; i < 8; ++i) {
    waiting.push_back(
        std::async(std::launch::async, [&] { return shared.get("late", in(20'000)); }));
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(shared.add("calls", 1), i + 1);
  other.set("late", "now");
  for (auto& value : waiting) EXPECT_EQ(value.get(), "now");
  auto counted = std::async(std::launch::async, [&] { return shared.get("sum", in(20'000)); });
  other.add("sum", 7);
  EXPECT_EQ(counted.get(), "7");
}

TEST(Rendezvous, ATimeOutNamesTheKeyAndLeavesTheClientUsable) {
  RendezvousServer server(kToken);
  auto one = client(server, 0, 1);
  EXPECT_THAT(message_of<TimeoutError>([&] { one.get("never", in(50)); }), HasSubstr("'never'"));
  one.set("never", "after all");
  EXPECT_EQ(one.get("never", in(50)), "after all");
}

TEST(Rendezvous, LargestValuesPassAndLargerOnesAreRefusedByTheClient) {
  RendezvousServer server(kToken);
  auto one = client(server, 0, 1);
  const std::string large(wire::kMaxValue, 'x'), key(wire::kMaxKey, 'k');
  one.set(key, large);
  EXPECT_EQ(one.get(key, in(20'000)), large);
  EXPECT_THROW(one.set("key", large + "x"), ConfigError);
  EXPECT_THROW(one.find(key + "k"), ConfigError);
  EXPECT_EQ(one.find("key"), std::nullopt);
}

TEST(Rendezvous, AddingToWordsIsAnErrorOfTheCaller) {
  RendezvousServer server(kToken);
  auto one = client(server, 0, 1);
  one.set("words", "many");
  EXPECT_THAT(message_of<ConfigError>([&] { one.add("words", 1); }), HasSubstr("'words'"));
  one.set("large", std::to_string(INT64_MAX));
  EXPECT_THROW(one.add("large", 1), ConfigError);
  EXPECT_EQ(one.add("count", 1), 1);
}

TEST(Rendezvous, ManyClientsAtOnce) {
  RendezvousServer server(kToken);
  constexpr int kRanks = 32;
  std::atomic<int> good{0};
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      auto mine = client(server, rank, kRanks);
      mine.set("rank/" + std::to_string(rank), std::to_string(rank * rank));
      int sum = 0;
      for (int peer = 0; peer < kRanks; ++peer) {
        sum += std::stoi(mine.get("rank/" + std::to_string(peer), in(20'000)));
      }
      if (sum == 31 * 32 * 63 / 6) ++good;
      mine.add("done", 1);
    });
  }
  ranks.clear();
  EXPECT_EQ(good, kRanks);
  EXPECT_EQ(client(server).find("done"), "32");
}

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
  const std::string hello =
      wire::frame(wire::Request{wire::Op::hello, {}, wire::pack(wire::Hello{-1, 0, 0})});
  const std::string frames[] = {
      std::string("\xff\xff\xff\xff", 4),                         // 4 GiB
      std::string("\x00\x00\x00\x00", 4),                         // nothing
      std::string("\x06\x00\x00\x00\x02\xff\xff\xff\x7f z", 11),  // a key longer than its frame
      std::string("\x05\x00\x00\x00\x63\x00\x00\x00\x00", 9),     // an unknown operation
      wire::frame(wire::Request{wire::Op::hello, {}, "short"}),   // said hello before
  };
  for (const std::string& frame : frames) {
    // Once as the first thing after the token, once after a proper hello.
    bytes_until_closed(raw(server, wire::greeting(kToken) + frame));
    const Fd fd = raw(server, wire::greeting(kToken) + hello + frame);
    shutdown(fd.get(), SHUT_WR);
    bytes_until_closed(fd);
    EXPECT_NO_THROW(good.add("count", 1));
  }
}

TEST(Rendezvous, ARankConnectsOnceAndAllCountTheSameWorld) {
  RendezvousServer server(kToken);
  auto first = client(server, 1, 4);
  EXPECT_THAT(message_of<ConfigError>([&] { client(server, 1, 4); }), HasSubstr("rank 1"));
  const auto size = message_of<ConfigError>([&] { client(server, 2, 8); });
  EXPECT_THAT(size, HasSubstr("8"));
  EXPECT_THAT(size, HasSubstr("4"));
  EXPECT_THROW(client(server, 4, 4), ConfigError);
  EXPECT_NO_THROW(client(server, 2, 4));
  EXPECT_NO_THROW(client(server, 2, 4));  // it left in order, so it may come again
}

// What those who wait for the meeting hear.
std::string meeting(RendezvousClient& waiting) { return waiting.get(kMeetingKey, in(20'000)); }

TEST(Rendezvous, OneWhoIsTurnedAwayEndsTheMeetingForAll) {
  {
    RendezvousServer server(kToken);
    auto first = client(server, 0, 3);
    EXPECT_THROW(client(server, 0, 3), ConfigError);
    const std::string why = message_of<ConfigError>([&] { meeting_result(meeting(first)); });
    EXPECT_THAT(why, HasSubstr("rank 0 is already connected"));
  }
  // Even if it is the first to come.
  RendezvousServer server(kToken, "127.0.0.1:0", {.ranks = 3});
  EXPECT_THROW(client(server, 2, 4), ConfigError);
  auto good = client(server, 1, 3);
  EXPECT_EQ(meeting(good), "refused rank 2 counts 4 ranks in all, rank 0 counts 3");
}

TEST(Rendezvous, NothingEndsAMeetingThatIsOverAndNobodyOfAnEarlierGenerationDoes) {
  RendezvousServer server(kToken);
  server.begin_generation(1);
  auto first = client(server, 0, 2, 1);
  EXPECT_THROW(client(server, 0, 2, 0), ConfigError);
  EXPECT_EQ(first.find(kMeetingKey), std::nullopt);
  first.set(kMeetingKey, "met all");
  EXPECT_THROW(client(server, 1, 3, 1), ConfigError);
  EXPECT_EQ(meeting_result(meeting(first)), "all");
}

TEST(Rendezvous, EveryIncarnationHasKeysOfItsOwn) {
  RendezvousServer server(kToken);
  auto old0 = client(server, 0, 2), old1 = client(server, 1, 2);
  old0.set(kMeetingKey, "met all");
  old0.set("key", "old");
  auto new0 = client(server, 0, 2);  // ahead of rank 1, and of its own former self
  EXPECT_EQ(new0.find("key"), std::nullopt);
  EXPECT_EQ(new0.find(kMeetingKey), std::nullopt);
  new0.set("key", "new");
  EXPECT_EQ(old1.get("key", in(20'000)), "old");
  auto waiting = std::async(std::launch::async, [&] { return new0.get("answer", in(20'000)); });
  old1.set("answer", "old");
  auto new1 = client(server, 1, 2);
  EXPECT_EQ(new1.get("key", in(20'000)), "new");
  new1.set("answer", "new");
  EXPECT_EQ(waiting.get(), "new");
}

TEST(Rendezvous, WhatIsLostInOneIncarnationMayComeToTheNext) {
  RendezvousServer server(kToken);
  auto old0 = client(server, 0, 2);
  { const Fd vanishes = joined(server, {1, 2, 0}); }
  EXPECT_THAT(old0.get(lost_key(1), in(20'000)), HasSubstr("closed"));
  EXPECT_THROW(meeting_result(meeting(old0)), PeerLost);
  auto new0 = client(server, 0, 2), new1 = client(server, 1, 2);
  EXPECT_EQ(new0.find(lost_key(1)), std::nullopt);
  EXPECT_EQ(new1.find(kMeetingKey), std::nullopt);
}

TEST(Rendezvous, OneWhoLeavesTooSoonEndsTheMeetingForAll) {
  RendezvousServer server(kToken);
  auto first = client(server, 0, 2);
  { auto leaves = client(server, 1, 2); }
  EXPECT_THROW(meeting_result(meeting(first)), PeerLost);
}

TEST(Rendezvous, ARankWhoseProcessHasEndedIsLostInAllIncarnationsToCome) {
  RendezvousServer server(kToken);
  auto old0 = client(server, 0, 2);
  {
    auto old1 = client(server, 1, 2);
    old0.set(kMeetingKey, "met all");
  }
  auto between = client(server, 0, 2);
  server.mark_lost(1, "ended with code 9");
  auto after = client(server, 0, 2);
  EXPECT_EQ(meeting_result(meeting(old0)), "all");
  for (auto* waits : {&between, &after}) {
    EXPECT_THROW(meeting_result(meeting(*waits)), PeerLost);
    EXPECT_EQ(waits->find(lost_key(1)), "ended with code 9");
  }
  // Its number is of no use to others.
  EXPECT_THROW(client(server, 1, 2), ConfigError);
}

TEST(Rendezvous, AServerOfOneIncarnationSendsRanksOnToTheNext) {
  const RendezvousServer::Expected once{.ranks = 2, .single = true};
  auto server = std::make_unique<RendezvousServer>(kToken, "127.0.0.1:0", once);
  const std::string address = server->address();
  auto old0 = client(*server, 0, 2), old1 = client(*server, 1, 2);
  old0.set(kMeetingKey, "met all");
  EXPECT_THAT(message_of<TimeoutError>([&] {
                RendezvousClient(address, kToken, {1, 2, 0}, in(100));
              }),
              HasSubstr("rank 1 has been here before"));
  auto next = std::async(std::launch::async, [&] {
    RendezvousClient one(address, kToken, {1, 2, 0}, in(20'000));
    return one.get("key", in(20'000));
  });
  old0.set("key", "old");
  server.reset();
  server = std::make_unique<RendezvousServer>(kToken, address, once);
  client(*server, 0, 2).set("key", "new");
  EXPECT_EQ(next.get(), "new");
}

TEST(Rendezvous, OneWhoIsLostEndsTheMeetingForAll) {
  RendezvousServer server(kToken);
  auto first = client(server, 0, 3);
  server.mark_lost(2, "ended with code 9");
  try {
    meeting_result(meeting(first));
    ADD_FAILURE() << "no exception";
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.rank(), 2);
    EXPECT_THAT(lost.what(), HasSubstr("rank 2 was lost before all ranks had come: ended with"));
  }
  EXPECT_THROW(meeting_result("late 1 of 2 came"), TimeoutError);
}

TEST(Rendezvous, TheFirstOfSeveralAddressesThatAnswersIsTaken) {
  const Fd nobody = bind_socket({"127.0.0.1", 0});  // bound, so nothing else answers there
  const std::string dead = HostPort{"127.0.0.1", port_of(nobody)}.text();
  RendezvousServer server(kToken);
  // 192.0.2.0/24 is for documents: what is sent there is swallowed, or refused.
  RendezvousClient found("192.0.2.1:9," + dead + "," + server.address() + ",no.such.name.invalid:1",
                         kToken, {0, 1, 0}, in(20'000));
  EXPECT_EQ(found.local_address(), "127.0.0.1");
  EXPECT_EQ(found.server_address(), "127.0.0.1");
}

TEST(Rendezvous, ListensOnBothFamilies) {
  RendezvousServer server(kToken, "[::]:0");
  const std::string port = server.address().substr(server.address().rfind(':'));
  for (const std::string address : {"127.0.0.1", "[::1]"}) {
    RendezvousClient one(address + port, kToken, {}, in(20'000));
    EXPECT_EQ("[" + one.server_address() + "]", address == "[::1]" ? address : "[127.0.0.1]");
  }
}

TEST(Rendezvous, ARankThatVanishesIsLostAndOneThatLeavesIsNot) {
  RendezvousServer server(kToken);
  auto watcher = client(server, 0, 3);
  { auto leaves = client(server, 1, 3); }
  { const Fd vanishes = joined(server, {2, 3, 0}); }
  EXPECT_THAT(watcher.get(lost_key(2), in(20'000)), HasSubstr("closed"));
  EXPECT_EQ(watcher.find(lost_key(1)), std::nullopt);
  server.mark_lost(1, "was killed by SIGKILL");
  EXPECT_EQ(watcher.find(lost_key(1)), "was killed by SIGKILL");
}

TEST(Rendezvous, ANewGenerationSeesNothingOfTheOld) {
  RendezvousServer server(kToken);
  auto old = client(server, 0, 2);
  auto launcher = client(server, 0, 1, kControlGeneration);
  old.set("key", "old");
  launcher.set("key", "launcher's");
  auto waiting = std::async(std::launch::async, [&] { return old.get("never", in(20'000)); });
  EXPECT_THAT(message_of<ConfigError>([&] { client(server, 1, 2, 1); }), HasSubstr("generation"));
  server.begin_generation(1);
  EXPECT_THROW(old.set("key", "still here"), CommError);
  EXPECT_THROW(waiting.get(), Error);
  EXPECT_THROW(client(server, 1, 2, 0), ConfigError);
  auto fresh = client(server, 0, 3, 1);  // another world size, too
  EXPECT_EQ(fresh.find("key"), std::nullopt);
  EXPECT_EQ(fresh.find(lost_key(0)), std::nullopt);
  EXPECT_EQ(launcher.find("key"), "launcher's");
}

TEST(Rendezvous, ClientsMayComeFirst) {
  const Fd holder = bind_socket({"127.0.0.1", 0});
  const std::string address = "127.0.0.1:" + std::to_string(port_of(holder));
  auto early = std::async(std::launch::async, [&] {
    RendezvousClient one(address, kToken, {0, 1, 0}, in(20'000));
    return one.add("count", 1);
  });
  RendezvousServer server(kToken, address);
  EXPECT_EQ(server.address(), address);
  EXPECT_EQ(early.get(), 1);
  // Nobody there at all: one message, at the deadline.
  const auto missing = message_of<TimeoutError>([&] {
    RendezvousClient("127.0.0.1:1", kToken, {0, 1, 0}, in(100));
  });
  EXPECT_THAT(missing, HasSubstr("127.0.0.1:1"));
  EXPECT_THROW(RendezvousClient("nonsense", kToken, {0, 1, 0}, in(100)), ConfigError);
}

TEST(Rendezvous, AServerThatGoesAwayIsAnErrorForThoseWhoAskAndThoseWhoWait) {
  auto server = std::make_unique<RendezvousServer>(kToken);
  auto one = client(*server, 0, 1);
  std::atomic<bool> started{false};
  auto waiting = std::async(std::launch::async, [&] {
    started = true;
    return one.get("never", in(20'000));
  });
  test::eventually([&] { return started.load(); });
  server.reset();
  EXPECT_THROW(waiting.get(), CommError);
  EXPECT_THROW(one.set("key", "value"), CommError);
}

TEST(Rendezvous, ThePortIsTakenOnceAndFreeAfterwards) {
  auto server = std::make_unique<RendezvousServer>(kToken);
  const std::string address = server->address();
  EXPECT_THAT(address, HasSubstr("127.0.0.1:"));
  EXPECT_THAT(message_of<SystemError>([&] { RendezvousServer(kToken, address); }),
              HasSubstr(address));
  { auto used = client(*server, 0, 1); }
  server.reset();
  EXPECT_NO_THROW(RendezvousServer(kToken, address));
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
