// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/agreement.h"

#include <algorithm>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::fabric {
namespace {

std::string describe_claim(const Claims& claims, int rank) {
  const Signature& signature = claims.signature(rank);
  if (signature.kind != OpKind::all_gather && signature.kind != OpKind::reduce_scatter)
    return describe(signature);
  const int64_t* counts =
      claims.counts(rank) + (signature.kind == OpKind::all_gather ? claims.size : 0);
  return format("{} in blocks of {}", describe(signature),
                join(std::vector<int64_t>(counts, counts + claims.size)));
}

[[noreturn]] void throw_sides(const Claims& claims) {
  std::vector<std::pair<std::string, std::vector<int>>> sides;  // what was called, by whom
  for (int rank = 0; rank < claims.size; ++rank) {
    const std::string text = describe_claim(claims, rank);
    const auto side =
        std::find_if(sides.begin(), sides.end(), [&](const auto& s) { return s.first == text; });
    if (side == sides.end()) {
      sides.push_back({text, {rank}});
    } else {
      side->second.push_back(rank);
    }
  }
  std::string message =
      format("ranks of group '{}' do not agree on operation #{}:", claims.group, claims.sequence);
  const char* separator = " ";
  for (const auto& [text, ranks] : sides) {
    message +=
        format("{}rank{} {} called {}", separator, ranks.size() > 1 ? "s" : "", join(ranks), text);
    separator = "; ";
  }
  throw MismatchError(message);
}

}  // namespace

void check_agreement(const Claims& claims) {
  const Signature& first = claims.signature(0);
  for (int rank = 1; rank < claims.size; ++rank) {
    if (claims.signature(rank) != first) throw_sides(claims);
  }
  if (first.kind != OpKind::all_to_all) return;
  for (int from = 0; from < claims.size; ++from) {
    for (int to = 0; to < claims.size; ++to) {
      const int64_t sent = claims.counts(from)[to], awaited = claims.counts(to)[claims.size + from];
      if (sent == awaited) continue;
      throw MismatchError(
          format("ranks of group '{}' do not agree on operation #{}, {}: rank {} sends {} elements "
                 "to rank {}, "
                 "which expects {}",
                 claims.group, claims.sequence, describe(first), from, sent, to, awaited));
    }
  }
}

void check_message(const std::string& group, int receiver, const Signature& asked,
                   const Signature& sent) {
  Signature comparable = sent;
  comparable.kind = asked.kind;
  comparable.root = asked.root;
  if (comparable == asked) return;
  throw MismatchError(format("group '{}': rank {} called {}, but rank {} called {}", group,
                             receiver, describe(asked), asked.root, describe(sent)));
}

}  // namespace lockstep::fabric
