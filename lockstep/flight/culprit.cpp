// SPDX-License-Identifier: Apache-2.0
#include "lockstep/flight/culprit.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "lockstep/core/format.h"

namespace lockstep::flight {
namespace {

using What = std::tuple<std::string, std::string, int64_t, std::string>;

What what_of(const Operation& operation) {
  // The counts of these may differ between ranks.
  const bool own_count =
      operation.name == "all_to_all" || operation.name == "gather" || operation.name == "scatter";
  return {operation.name, operation.dtype, own_count ? 0 : operation.count, operation.tag};
}

const Flight* flight_of(const std::vector<Flight>& flights, int rank) {
  for (const Flight& flight : flights) {
    if (flight.rank == rank) return &flight;
  }
  return nullptr;
}

std::string ranks_text(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  return format("rank{} {}", ranks.size() > 1 ? "s" : "", join(ranks));
}

int64_t wall(const Flight& flight, int64_t time) { return time + flight.clock_offset; }

// The earliest collective that ranks of one group have called differently.
std::optional<Culprit> find_mismatch(const std::vector<Flight>& flights) {
  struct Caller {
    const Flight* flight;
    const Operation* operation;
  };
  std::map<std::pair<std::string, uint32_t>, std::vector<Caller>> calls;
  for (const Flight& flight : flights) {
    for (const Operation& operation : flight.operations) {
      if (!operation.message && operation.group != "(others)")
        calls[{operation.group, operation.number}].push_back({&flight, &operation});
    }
  }
  std::optional<Culprit> first;
  int64_t first_time = 0;
  for (const auto& [key, callers] : calls) {
    std::map<What, std::vector<Caller>> kinds;
    for (const Caller& caller : callers) kinds[what_of(*caller.operation)].push_back(caller);
    if (kinds.size() < 2) continue;
    int64_t time = 0;
    for (const Caller& caller : callers)
      time = std::max(time, wall(*caller.flight, caller.operation->began));
    if (first && time >= first_time) continue;
    const auto most = std::max_element(
        kinds.begin(), kinds.end(),
        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    const auto least =
        std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) { return &kind != &*most; });
    Culprit culprit{.kind = Culprit::Kind::mismatch,
                    .rank = least->second[0].flight->rank,
                    .waiting = {},
                    .operation = *most->second[0].operation,
                    .waited_ns = 0,
                    .text = {}};
    for (const Caller& caller : most->second) culprit.waiting.push_back(caller.flight->rank);
    const bool tie = least->second.size() == most->second.size();
    culprit.text =
        format("{} called {} where {} called {}{}", ranks_text({culprit.rank}),
               least->second[0].operation->text(), ranks_text(culprit.waiting),
               culprit.operation.text(), tie ? "; either may be the one that is wrong" : "");
    if (const int64_t step = least->second[0].flight->step; step >= 0)
      culprit.text += format(", after step {}", step);
    first = std::move(culprit);
    first_time = time;
  }
  return first;
}

// The ranks that have not come to an operation that another waits in.
std::vector<int> awaited_ranks(const std::vector<Flight>& flights, const Flight& waiter,
                               const Operation& operation) {
  std::vector<int> ranks;
  if (operation.message) {
    const Flight* const peer = flight_of(flights, operation.peer);
    if (peer == nullptr) return ranks;
    const std::string other = operation.name == "send" ? "recv" : "send";
    const bool came = std::ranges::any_of(peer->operations, [&](const Operation& its) {
      return its.message && its.name == other && its.group == operation.group &&
             its.peer == waiter.rank && its.number >= operation.number;
    });
    if (!came) ranks.push_back(peer->rank);
    return ranks;
  }
  for (const Flight& other : flights) {
    if (other.rank == waiter.rank) continue;
    const int64_t calls = other.calls_of(operation.group);
    if (calls >= 0 && calls < operation.number) ranks.push_back(other.rank);
  }
  return ranks;
}

// How long an operation usually takes: the 99th percentile of those in the recorders, 0 where none
// has ended.
int64_t usual_ns(const std::vector<Flight>& flights, const Operation& operation) {
  std::vector<int64_t> times;
  for (const Flight& flight : flights) {
    for (const Operation& other : flight.operations) {
      // The first of a group sets things up.
      if (!other.running() && other.number > 1 && other.name == operation.name &&
          other.group == operation.group)
        times.push_back(other.ended - other.began);
    }
  }
  if (times.empty()) return 0;
  // Of few, those of the first step may be the slowest: a tenth is left out.
  const size_t last = times.size() - 1;
  const auto at = times.begin() +
                  static_cast<std::ptrdiff_t>(times.size() < 100 ? last * 9 / 10 : last * 99 / 100);
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

std::string what_it_did(const Flight& flight) {
  const std::string end = flight.end.empty() ? "" : flight.end + "; ";
  return end + flight.doing();
}

}  // namespace

std::optional<Culprit> find_culprit(const std::vector<Flight>& flights, bool patient) {
  if (auto mismatch = find_mismatch(flights)) return mismatch;
  struct Wait {
    const Flight* waiter;
    const Operation* operation;
    std::vector<int> on;
    int64_t ns;
  };
  std::map<int, Wait> waits;
  for (const Flight& flight : flights) {
    // Of several, as on a device, the first that others have not come to.
    for (const Operation& operation : flight.operations) {
      if (!operation.running() || operation.waited == 0) continue;
      const int64_t ns = flight.taken_at - operation.waited;
      if (patient && (ns < int64_t{operation.patience_ms} * 1'000'000 ||
                      ns < 10 * usual_ns(flights, operation)))
        continue;
      auto on = awaited_ranks(flights, flight, operation);
      if (on.empty()) continue;
      waits[flight.rank] = {&flight, &operation, std::move(on), ns};
      break;
    }
  }
  // From the one that has waited longest, along who waits for whom.
  const Wait* longest = nullptr;
  for (const auto& [rank, wait] : waits) {
    if (longest == nullptr || wait.ns > longest->ns) longest = &wait;
  }
  if (longest == nullptr) return std::nullopt;
  std::set<int> seen{longest->waiter->rank};
  const Wait* last = longest;
  int rank = longest->on.front();
  bool cycle = false;
  while (true) {
    if (!seen.insert(rank).second) {
      cycle = true;
      break;
    }
    const auto next = waits.find(rank);
    if (next == waits.end()) break;
    last = &next->second;
    rank = next->second.on.front();
  }
  const Flight& suspect = *flight_of(flights, rank);
  Culprit culprit{.kind = cycle ? Culprit::Kind::deadlock : Culprit::Kind::missing,
                  .rank = rank,
                  .waiting = {},
                  .operation = *last->operation,
                  .waited_ns = 0,
                  .text = {}};
  for (const auto& [waiter, wait] : waits) {
    if (std::ranges::find(wait.on, rank) == wait.on.end()) continue;
    culprit.waiting.push_back(waiter);
    culprit.waited_ns = std::max(culprit.waited_ns, wait.ns);
  }
  const bool many = culprit.waiting.size() > 1;
  culprit.text = format("{} {} waited {:.1f} s in {} for rank {}: {}", ranks_text(culprit.waiting),
                        many ? "have" : "has", static_cast<double>(culprit.waited_ns) / 1e9,
                        culprit.operation.text(), rank, what_it_did(suspect));
  if (cycle) culprit.text += "; they wait for each other in different operations";
  return culprit;
}

std::string verdict(const std::vector<Flight>& flights) {
  const Flight* first = nullptr;  // to end, where the dumps say so
  for (const Flight& flight : flights) {
    if (flight.ended_at != 0 &&
        (first == nullptr || wall(flight, flight.ended_at) < wall(*first, first->ended_at)))
      first = &flight;
  }
  const auto culprit = find_culprit(flights);
  const bool killed = first != nullptr && first->end.find("killed") != std::string::npos;
  if (culprit && (!killed || culprit->kind == Culprit::Kind::mismatch)) {
    return format("rank {} left the common order first: {}", culprit->rank, culprit->text);
  }
  if (first != nullptr) {
    return format("rank {} left first: it {}, {}{}", first->rank, first->end, first->doing(),
                  first->failure.empty() ? "" : "; it failed with: " + first->failure);
  }
  return "no rank has left the common order";
}

}  // namespace lockstep::flight
