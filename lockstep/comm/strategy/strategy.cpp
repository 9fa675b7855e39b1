// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/strategy/strategy.h"

#include <algorithm>

#include "lockstep/comm/backends/shm/shm.h"
#include "lockstep/comm/control/host_layout.h"
#include "lockstep/comm/strategy/hierarchical.h"
#include "lockstep/comm/strategy/ring.h"
#include "lockstep/comm/strategy/strategy_group.h"
#include "lockstep/comm/strategy/table.h"
#include "lockstep/comm/strategy/tree.h"
#include "lockstep/core/format.h"

namespace lockstep::comm::strategy {
namespace {

using layout::CommStrategy;

// Makes the algorithms of one group, and the groups they need.
class Maker {
 public:
  Maker(const Membership& membership, std::string backend, HostLayout layout)
      : base_(membership), backend_(std::move(backend)), layout_(std::move(layout)) {
    // What was called is compared where it is announced; of the parts' operations all is known, but
    // what they move between hosts has checksums. All groups of the job share memory.
    if (backend_inside(backend_) == "shm") shm::make_heap(*base_.world);
    base_.world = std::make_shared<detail::World>(*base_.world);
    if (layout_.hosts.size() == 1) base_.world->check = false;
  }

  std::unique_ptr<Algorithm> make(CommStrategy strategy) {
    if (strategy == CommStrategy::hierarchical) return make_hierarchy();
    return strategy == CommStrategy::ring ? make_ring(messages("ring"))
                                          : make_tree(messages("tree"));
  }

 private:
  AlgorithmGroup make_algorithm_group(const std::string& name, const std::vector<int>& ranks,
                                      const std::string& backend) {
    return AlgorithmGroup(make_plain_group(detail::subgroup(base_, name, ranks), backend), ranks);
  }
  AlgorithmGroup messages(const char* strategy) {
    std::vector<int> all(layout_.host.size());
    for (size_t rank = 0; rank < all.size(); ++rank) all[rank] = static_cast<int>(rank);
    return make_algorithm_group(format("{}:{}", base_.name, strategy), all, backend_);
  }
  std::unique_ptr<Algorithm> make_hierarchy() {
    const auto me = static_cast<size_t>(base_.rank);
    const int host = layout_.host[me], place = layout_.place[me];
    AlgorithmGroup inside =
        make_algorithm_group(format("{}:host{}", base_.name, host),
                             layout_.hosts[static_cast<size_t>(host)], backend_inside(backend_));
    AlgorithmGroup across = make_algorithm_group(format("{}:across{}", base_.name, place),
                                                 layout_.peers(base_.rank), backend_);
    return make_hierarchical(layout_, base_.rank, std::move(inside), std::move(across));
  }

  Membership base_;
  std::string backend_;
  HostLayout layout_;
};

}  // namespace

std::shared_ptr<GroupImpl> create(Membership membership, std::string backend) {
  const CommStrategy strategy = membership.world->strategy;
  HostLayout layout = detail::host_layout(membership);
  const bool one_host = layout.hosts.size() == 1;
  const bool one_rank_each = layout.hosts.size() == static_cast<size_t>(membership.size());
  // NCCL's groups have another for host memory, which is what strategies are about.
  std::string carrier = backend == "nccl" ? membership.world->host_backend : backend;
  if (one_host && (strategy == CommStrategy::hierarchical || strategy == CommStrategy::adaptive))
    carrier = backend_inside(carrier);
  if (backend != "nccl") backend = carrier;
  const bool has_hierarchy = !one_host && !one_rank_each;

  Table table;
  if (strategy == CommStrategy::adaptive) {
    table = shared_table(membership, carrier + " " + layout.to_text(), has_hierarchy);
  } else if (strategy != CommStrategy::hierarchical || has_hierarchy) {
    table = Table::always(strategy);
  }
  std::vector<std::unique_ptr<Algorithm>> algorithms;
  auto inner = make_plain_group(membership, backend);
  Maker maker(membership, carrier, std::move(layout));
  // In the order of the enumeration, the same on all ranks.
  for (const CommStrategy used : table.strategies()) algorithms.push_back(maker.make(used));
  if (algorithms.empty()) return inner;
  return std::make_shared<StrategyGroup>(std::move(inner), std::move(table), std::move(algorithms));
}

}  // namespace lockstep::comm::strategy
