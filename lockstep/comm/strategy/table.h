// SPDX-License-Identifier: Apache-2.0
// Which strategy is the fastest for which operation and size: measured by `lockstep bench
// collectives --calibrate`, kept in a file of this machine, read by CommStrategy::adaptive.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/comm/backend.h"
#include "lockstep/fabric/operation.h"
#include "lockstep/layout/parallel_config.h"

namespace lockstep::comm::strategy {

class Table {
 public:
  // The backend's own for everything.
  Table() = default;
  // One for everything that it covers.
  static Table always(layout::CommStrategy strategy);

  // `bytes` is the size of the whole, as operations count it (Operation::count).
  void add(fabric::OpKind kind, int64_t bytes, layout::CommStrategy strategy);
  // What was measured nearest to this size, in proportion.
  layout::CommStrategy choose(fabric::OpKind kind, int64_t bytes) const;
  // Those that are not the backend's own.
  std::set<layout::CommStrategy> strategies() const;

  // As one JSON object: {"all_reduce": [[1024, "tree"], ...], ...}. Throws ConfigError that says
  // what is wrong with a text.
  std::string to_json() const;
  static Table from_json(const std::string& text);

  bool operator==(const Table&) const = default;

 private:
  layout::CommStrategy otherwise_ = layout::CommStrategy::all_reduce;
  std::map<fabric::OpKind, std::map<int64_t, layout::CommStrategy>> rows_;
};

// $XDG_CACHE_HOME/lockstep/collectives.json, else in ~/.cache. Empty where neither is set.
std::string table_path();
// Adds a table to the file at this path, or replaces it. The key is a backend and a layout, such as
// "gloo 2+2".
void save_table(const std::string& path, const std::string& key, const Table& table);

// Rank 0's table for this key, on all ranks; where it has none, the hierarchy if there is one, else
// the backend's own. A file that is damaged or was measured on another machine counts for nothing,
// and is warned of once. Collective.
Table shared_table(const detail::Membership& membership, const std::string& key,
                   bool has_hierarchy);

}  // namespace lockstep::comm::strategy
