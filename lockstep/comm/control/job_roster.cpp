// SPDX-License-Identifier: Apache-2.0
// Every rank leaves a card: its host, by which address it came, and what must be the same on all.
// The last rank compares them and publishes the result, which all wait for; so no rank asks for the
// cards of a job that is not complete.
#include "lockstep/comm/control/job_roster.h"

#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>

#include "lockstep/comm/control/rank_consistency.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/version.h"
#include "lockstep/launch/rendezvous/network_interface.h"

namespace lockstep::comm::detail {
namespace {

constexpr milliseconds kRank0First{1'000};  // it says who is missing; the others repeat it

constexpr milliseconds kHearing{1'000};

constexpr size_t kMaxPlaces = 16;  // a machine may have an address for each of its containers

std::string link_target(const char* path) {
  char target[PATH_MAX];
  const ssize_t size = readlink(path, target, sizeof target);
  return size < 0 ? std::string() : std::string(target, static_cast<size_t>(size));
}

struct Card {
  std::string identity, server;  // `server` is the rendezvous address, as this rank has it
  Stated stated;                 // what must be the same

  std::string pack() const {
    return format("{}\n{}\n{}\n{}", identity, server, stated.host, join(stated.lines, "\n"));
  }
  static Card unpack(const std::string& text) {
    auto lines = lines_of(text);
    lines.resize(std::max<size_t>(lines.size(), 3));
    return {lines[0], lines[1], {lines[2], {lines.begin() + 3, lines.end()}}};
  }
};

std::string card_key(int rank) { return format("card/{}", rank); }

std::string compare(const std::vector<Card>& cards) {
  std::vector<Stated> stated;
  for (const Card& card : cards) stated.push_back(card.stated);
  const std::string differs = difference(stated);
  if (!differs.empty()) {
    return format("refused [init] the ranks differ: {}; it must be the same on all of them",
                  differs);
  }
  std::vector<std::string> known;
  std::vector<int> hosts;
  // How ranks of other hosts came to the host of the rendezvous, which rank 0 is on.
  std::string address = "-";
  for (const Card& card : cards) {
    const auto found = std::find(known.begin(), known.end(), card.identity);
    hosts.push_back(static_cast<int>(found - known.begin()));
    if (found == known.end()) known.push_back(card.identity);
    if (hosts.back() != 0 && address == "-") address = card.server;
  }
  return format("met {} {} {}", new_incarnation(), address, join(hosts, " "));
}

std::string who_is_missing(launch::Store& store, const RankEnv& env) {
  std::vector<int> missing;
  for (int rank = 0; rank < env.world_size; ++rank) {
    if (!store.find(card_key(rank))) missing.push_back(rank);
  }
  return format("late [init] {} of {} ranks joined; missing: {}",
                env.world_size - static_cast<int>(missing.size()), env.world_size, join(missing));
}

// The result of the rendezvous, from any rank.
std::string wait_for_result(launch::Store& store, const RankEnv& env, const Deadline& deadline) {
  try {
    return store.get(launch::kJoinedKey,
                     env.rank == 0 ? deadline : Deadline(deadline.left() + kRank0First));
  } catch (const TimeoutError&) {
    const std::string late = who_is_missing(store, env);
    // Who came last may be about to say something else.
    if (store.add("verdicts", 1) > 1) return store.get(launch::kJoinedKey, Deadline(kHearing));
    store.set(launch::kJoinedKey, late);
    return late;
  }
}

}  // namespace

std::string host_of(launch::Store& store, int rank) {
  try {
    const auto card = store.find(card_key(rank));
    return card ? Card::unpack(*card).stated.host : "";
  } catch (const std::exception&) {  // the rendezvous is gone
    return "";
  }
}

uint64_t new_incarnation() {
  std::random_device random;  // the kernel's
  return uint64_t{random()} << 32 | random();
}

std::string host_identity() {
  if (const char* given = std::getenv("LOCKSTEP_HOST")) return given;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return format("{} {} {} {}", host_name(), boot, link_target("/proc/self/ns/pid"),
                link_target("/proc/self/ns/net"));
}

std::string places(const std::string& named, std::vector<std::string> addresses, uint16_t port) {
  // Engines connect ranks by the addresses that they came with, which must be of one family.
  std::ranges::stable_partition(
      addresses, [](const std::string& address) { return address.find(':') == std::string::npos; });
  if (!named.empty()) addresses.insert(addresses.begin(), named);
  if (addresses.empty()) addresses.push_back(host_name());
  if (addresses.size() > kMaxPlaces) addresses.resize(kMaxPlaces);
  for (std::string& address : addresses) address = launch::HostPort{address, port}.text();
  return join(addresses, ",");
}

JobRoster make_job_roster(launch::RendezvousClient& store, const RankEnv& env,
                          const std::vector<std::string>& common, const Deadline& deadline) {
  Card mine{host_identity(),
            store.server_address(),
            {host_name(), {"Lockstep " LOCKSTEP_VERSION, "libtorch " TORCH_VERSION}}};
  mine.stated.lines.insert(mine.stated.lines.end(), common.begin(), common.end());
  store.set(card_key(env.rank), mine.pack());
  if (store.add("came", 1) == env.world_size) {
    std::vector<Card> cards;
    for (int rank = 0; rank < env.world_size; ++rank)
      cards.push_back(Card::unpack(store.get(card_key(rank), deadline)));
    if (store.add("verdicts", 1) == 1) store.set(launch::kJoinedKey, compare(cards));
  }
  const std::string result = wait_for_result(store, env, deadline);
  std::istringstream words;
  try {
    words.str(launch::join_result(result));
  } catch (const Error&) {
    if (store.add("heard", 1) == env.world_size) store.set("all heard", "yes");
    throw;
  }
  JobRoster roster;
  words >> roster.incarnation >> roster.address;
  if (roster.address == "-") roster.address.clear();  // all are on one host
  for (int number = 0; words >> number;) roster.hosts.push_back(number);
  check(static_cast<int>(roster.hosts.size()) == env.world_size, "every rank has a host");
  if (roster.hosts[static_cast<size_t>(env.rank)] != 0) roster.address = store.local_address();
  const std::string interface = launch::interface_from_environment();
  if (!interface.empty()) roster.address = launch::address_of_interface(interface, roster.address);
  return roster;
}

void let_others_hear(launch::Store& store) {
  try {
    store.get("all heard", Deadline(kHearing));
  } catch (const Error&) {  // one of them has gone without a word
  }
}

}  // namespace lockstep::comm::detail
