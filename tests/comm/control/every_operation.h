// SPDX-License-Identifier: Apache-2.0
// One call of every kind, for tests of what arrives.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/comm/collectives.h"

namespace lockstep::test {

struct NamedOperation {
  std::string name;
  // That rank 0 of two ranks receives: a record of the call or the header of a message, then data.
  int pieces;
  // Waits for it; returns what this rank has then.
  std::function<at::Tensor(const comm::Group&)> run;
};

inline std::vector<NamedOperation> every_operation() {
  using namespace comm;
  constexpr int64_t kSmall = 301, kLarge = 70'001;
  const auto data = [](const Group& group, int64_t count) {
    return at::arange(count, at::kDouble).mul_(0.37 + group.rank()).sin_().to(at::kFloat);
  };
  std::vector<NamedOperation> all;
  for (const int64_t count : {kSmall, kLarge}) {
    const std::string suffix = count == kLarge ? "_large" : "";
    // Large ones have a second step: checksums of sums, and the sums.
    const int pieces = count == kLarge ? 4 : 2;
    all.push_back({"all_reduce" + suffix, pieces, [=](const Group& group) {
                     const at::Tensor sum = data(group, count);
                     all_reduce(sum, group).wait();
                     return sum;
                   }});
    all.push_back({"reduce" + suffix, pieces, [=](const Group& group) {
                     const at::Tensor sum = data(group, count);
                     reduce(sum, group, {.root = 0}).wait();
                     return sum;
                   }});
    all.push_back({"reduce_scatter" + suffix, 2, [=](const Group& group) {
                     const at::Tensor block = at::zeros({count});
                     reduce_scatter(block, data(group, count * group.size()), group).wait();
                     return block;
                   }});
    all.push_back({"broadcast" + suffix, 2, [=](const Group& group) {
                     const at::Tensor told = data(group, count);
                     broadcast(told, group, {.root = 1}).wait();
                     return told;
                   }});
    all.push_back({"all_gather" + suffix, 2, [=](const Group& group) {
                     const at::Tensor whole = at::zeros({count * group.size()});
                     all_gather(whole, data(group, count), group).wait();
                     return whole;
                   }});
    all.push_back({"all_to_all" + suffix, 2, [=](const Group& group) {
                     const at::Tensor input = data(group, count * group.size());
                     const at::Tensor output = at::zeros_like(input);
                     all_to_all(output, input, group).wait();
                     return output;
                   }});
    all.push_back({"gather" + suffix, 2, [=](const Group& group) {
                     const at::Tensor whole = at::zeros({count * group.size()});
                     gather(whole, data(group, count), group, {.root = 0}).wait();
                     return whole;
                   }});
    all.push_back({"scatter" + suffix, 2, [=](const Group& group) {
                     const at::Tensor block = at::zeros({count});
                     scatter(block, data(group, count * group.size()), group, {.root = 1}).wait();
                     return block;
                   }});
    all.push_back(
        {"recv" + suffix, 2, [=](const Group& group) {
           const at::Tensor message = data(group, count);
           if (group.rank() < 2)
             (group.rank() == 1 ? send(message, 0, group) : recv(message, 1, group)).wait();
           return message;
         }});
  }
  all.push_back({"all_gather_uneven", 2, [=](const Group& group) {
                   std::vector<int64_t> counts;
                   for (int rank = 0; rank < group.size(); ++rank) counts.push_back(5 + rank);
                   const at::Tensor whole = at::zeros({5 * group.size() + counts.back() * 3});
                   const int64_t total = group.size() * 5 + group.size() * (group.size() - 1) / 2;
                   all_gather(whole.slice(0, 0, total), data(group, 5 + group.rank()), group,
                              {.counts = counts})
                       .wait();
                   return whole;
                 }});
  all.push_back({"barrier", 1, [](const Group& group) {
                   barrier(group).wait();
                   return at::zeros({1});
                 }});
  return all;
}

}  // namespace lockstep::test
