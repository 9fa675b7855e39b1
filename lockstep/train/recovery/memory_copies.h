// SPDX-License-Identifier: Apache-2.0
// Copies of what a job holds, after every step, in memory that outlives its ranks (run.recovery
// memory). Private: not installed.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/slices.h"
#include "lockstep/comm/group.h"
#include "lockstep/memory/pinning/pinned_pages.h"
#include "lockstep/train/recovery/copied_slices.h"
#include "lockstep/train/recovery/copy_exchange.h"
#include "lockstep/train/recovery/copy_region.h"

namespace lockstep::train {

// Where a rank's launcher keeps copies.
struct CopyMemory {
  int descriptor = -1;  // launch::kRecoveryVariable
  int local_rank = 0, local_size = 1;
  int64_t generation = 0;  // starts of the job before this one

  // ConfigError where no launcher keeps copies.
  static CopyMemory of_launcher();
};

// The launcher of each node keeps the copies of its ranks, and those of the node before it that no
// other node has. Of a slice that several ranks of a node hold, one rank has the copy. Ranks wait()
// before they exchange the sums of a step, so when one of them writes over the copy of step N - 1,
// all have that of step N.
class MemoryCopies {
 public:
  using Slices = std::vector<checkpoint::NamedSlice>;

  // Collective. `identity` is what must not differ between a copy and the run that continues from
  // it; the layout and the number of ranks may. `slices` gives what this rank holds.
  struct Options {
    // begin() returns when the copy is complete, for state that is not in memory all the time.
    bool at_once = false;
    // One copy more is kept, the newest that was verified, where ranks hold the same slices.
    bool verifies = false;
  };
  MemoryCopies(const comm::Group& world, const CopyMemory& memory, std::string identity,
               std::function<Slices()> slices, Options options);
  ~MemoryCopies();
  MemoryCopies(const MemoryCopies&) = delete;
  MemoryCopies& operator=(const MemoryCopies&) = delete;

  struct Restored {
    int64_t step = 0;
    std::map<std::string, std::string> state = {};
  };
  // Collective. Fills the slices from the newest copies that have all of them. Nothing where there
  // are none; after a restart one rank says why. ConfigError where memory for copies is short.
  std::optional<Restored> restore();

  // Copies concurrently with what follows. The slices must stay as they are until wait().
  // Collective.
  void begin(int64_t step, const std::map<std::string, std::string>& state);
  void wait();
  // The state is right, and so was it when the newest copy was made: damage would have stayed.
  void verified();
  // Of the copies only the verified ones are left: memory is damaged.
  void distrust();
  // No copy is left: what follows does not continue from them.
  void forget();

 private:
  // An area that this rank has looked at.
  struct Looked {
    int region = 0, area = 0;
    std::unique_ptr<CopyRegion> opened;
    CopyRegion::Found found;
  };
  // A region that this rank writes.
  struct Stretch {
    int region = 0, area = 0;
    int from = -1;            // the rank whose copies come here; -1: this one's
    std::string text = {};    // the list of their slices
    uint64_t data_bytes = 0;  // of a copy
    std::unique_ptr<CopyRegion> opened = {};
  };
  int node() const { return world_.rank() - memory_.local_rank; }  // the first rank on it
  void share(const Slices& slices, bool verifies);
  std::vector<FoundCopies> look();
  std::optional<CopyId> newest(const std::vector<FoundCopies>& found, const CopyIndex& index) const;
  void make_room(const std::optional<CopyId>& chosen);
  void require_room() const;
  void drop_old();
  void pin(std::span<std::byte> pages);
  void write(int64_t step, const std::string& state, const Slices& mine);

  const comm::Group world_;
  const CopyMemory memory_;
  const std::string identity_;
  const std::function<Slices()> slices_;
  const bool at_once_;
  int copies_ = 2;                          // of a step each, that a region holds
  Slices kept_;                             // of this rank, unless it copies at once
  std::vector<CopiedSlice> held_;           // the same, as copies list them
  std::vector<size_t> mine_;                // slices that this rank copies, in order
  std::vector<Stretch> stretches_;          // this rank's own, then those for ranks of another node
  uint64_t node_bytes_ = 0;                 // of all stretches of the node
  std::unique_ptr<CopyExchange> exchange_;  // none: nothing is sent between nodes
  std::vector<Looked> looked_at_;
  std::string refused_;
  // Copies of another layout, until all ranks have new ones.
  std::vector<std::unique_ptr<CopyRegion>> old_;
  bool moved_ = false;  // some rank has such
  int begun_ = 0;
  std::map<std::byte*, std::unique_ptr<memory::PinnedPages>> pinned_;  // of the regions above
  std::future<void> running_;
};

}  // namespace lockstep::train
