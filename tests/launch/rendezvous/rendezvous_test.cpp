// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "tests/launch/rendezvous/support.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::launch {
namespace {

using test::says;
using ::testing::HasSubstr;
using ::testing::Not;

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

// What those who wait until all have joined hear.
std::string joined(RendezvousClient& waiting) { return waiting.get(kJoinedKey, in(20'000)); }

TEST(Rendezvous, ARefusedRankEndsTheRendezvousForAll) {
  {
    RendezvousServer server(kToken);
    auto first = client(server, 0, 3);
    EXPECT_THROW(client(server, 0, 3), ConfigError);
    const std::string why = message_of<ConfigError>([&] { join_result(joined(first)); });
    EXPECT_THAT(why, HasSubstr("rank 0 is already connected"));
  }
  // Even if it is the first to come.
  RendezvousServer server(kToken, "127.0.0.1:0", {.ranks = 3});
  EXPECT_THROW(client(server, 2, 4), ConfigError);
  auto good = client(server, 1, 3);
  EXPECT_EQ(joined(good), "refused rank 2 counts 4 ranks in all, rank 0 counts 3");
}

TEST(Rendezvous, EarlierGenerationsCannotEndARendezvousAndNothingEndsAFinishedOne) {
  RendezvousServer server(kToken);
  server.begin_generation(1, 0);
  auto first = client(server, 0, 2, 1);
  EXPECT_THROW(client(server, 0, 2, 0), ConfigError);
  EXPECT_EQ(first.find(kJoinedKey), std::nullopt);
  first.set(kJoinedKey, "met all");
  EXPECT_THROW(client(server, 1, 3, 1), ConfigError);
  EXPECT_EQ(join_result(joined(first)), "all");
}

TEST(Rendezvous, EveryIncarnationHasKeysOfItsOwn) {
  RendezvousServer server(kToken);
  auto old0 = client(server, 0, 2), old1 = client(server, 1, 2);
  old0.set(kJoinedKey, "met all");
  old0.set("key", "old");
  auto new0 = client(server, 0, 2);  // ahead of rank 1, and of its own former self
  EXPECT_EQ(new0.find("key"), std::nullopt);
  EXPECT_EQ(new0.find(kJoinedKey), std::nullopt);
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
  EXPECT_THROW(join_result(joined(old0)), PeerLost);
  auto new0 = client(server, 0, 2), new1 = client(server, 1, 2);
  EXPECT_EQ(new0.find(lost_key(1)), std::nullopt);
  EXPECT_EQ(new1.find(kJoinedKey), std::nullopt);
}

TEST(Rendezvous, ARankThatLeavesEarlyEndsTheRendezvousForAll) {
  RendezvousServer server(kToken);
  auto first = client(server, 0, 2);
  { auto leaves = client(server, 1, 2); }
  EXPECT_THROW(join_result(joined(first)), PeerLost);
}

TEST(Rendezvous, ARankWhoseProcessHasEndedIsLostInAllIncarnationsToCome) {
  RendezvousServer server(kToken);
  auto old0 = client(server, 0, 2);
  {
    auto old1 = client(server, 1, 2);
    old0.set(kJoinedKey, "met all");
  }
  auto between = client(server, 0, 2);
  server.mark_lost(1, "ended with code 9");
  auto after = client(server, 0, 2);
  EXPECT_EQ(join_result(joined(old0)), "all");
  for (auto* waits : {&between, &after}) {
    EXPECT_THROW(join_result(joined(*waits)), PeerLost);
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
  old0.set(kJoinedKey, "met all");
  EXPECT_THAT(message_of<TimeoutError>([&] {
                RendezvousClient(address, kToken, {1, 2, 0}, in(100));
              }),
              says("rank 1 ... next incarnation"));
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

TEST(Rendezvous, ALostRankEndsTheRendezvousForAll) {
  RendezvousServer server(kToken);
  auto first = client(server, 0, 3);
  server.mark_lost(2, "ended with code 9");
  try {
    join_result(joined(first));
    ADD_FAILURE() << "no exception";
  } catch (const PeerLost& lost) {
    EXPECT_EQ(lost.rank(), 2);
    EXPECT_THAT(lost.what(), says("rank 2 was lost ... ended with"));
  }
  EXPECT_THROW(join_result("late 1 of 2 came"), TimeoutError);
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
  server.begin_generation(1, 0);
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

// It may go between any two messages, and between the connection that asks and the one that waits.
TEST(Rendezvous, AServerThatGoesAwayIsAnErrorForThoseWhoAskAndThoseWhoWait) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    auto server = std::make_unique<RendezvousServer>(kToken);
    auto one = client(*server, 0, 1);
    std::atomic<bool> started{false};
    auto waiting = std::async(std::launch::async, [&] {
      started = true;
      return message_of<CommError>([&] { one.get("never", in(5000)); });
    });
    while (!started) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    server.reset();
    EXPECT_THAT(waiting.get(), Not(HasSubstr("deadline"))) << round;
    EXPECT_THROW(one.set("key", "value"), CommError);
  }
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

}  // namespace
}  // namespace lockstep::launch
