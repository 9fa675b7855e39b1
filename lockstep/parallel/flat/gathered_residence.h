// SPDX-License-Identifier: Apache-2.0
// Parameters that are gathered from the shards of all ranks, or cast from this rank's own, for each
// use. Private: not installed.
#pragma once

#include <vector>

#include "lockstep/comm/peer_memory.h"
#include "lockstep/comm/work.h"
#include "lockstep/parallel/flat/residence.h"

namespace lockstep::parallel::detail {

class GatheredResidence : public Residence {
 public:
  GatheredResidence(FlatParameter& parameter, FlatShard& shard, FlatEnvironment& environment);

  bool acquire(When when) override;
  void release() override;
  void publish() override;

 protected:
  // Memory for a line, until it is released.
  virtual at::Tensor line_memory(at::ScalarType dtype, c10::Device device);
  // Acquiring would not go past a budget.
  virtual bool has_room() const { return true; }
  // Begins to fill line_, concurrently with the computation or not. wait() returns when what was
  // begun has arrived, and finish() leaves it in line_.
  virtual void begin(bool beside_computation);
  virtual void wait();
  virtual void finish();
  // The values in line_ are not needed any more, or could not be gathered.
  virtual void drop_line();
  // To acquire now would take something from other ranks, or even their part in it.
  bool communicates() const { return plan_.shard.size() > 1 && !copy_is_valid_; }
  bool is_collective() const { return communicates() && !peers_; }

  const FlatPlan& plan_;
  FlatParameter& parameter_;
  FlatShard& shard_;
  FlatEnvironment& environment_;
  at::Tensor line_;  // while it is live or on its way

 private:
  // Of what peers have; small enough that two threads can share the work.
  struct PeerSlice {
    int rank;
    int64_t source;  // elements into what that rank sends
    int64_t target;  // elements into the line
    int64_t count;
    // Where parameters are encoded: of the rank's block, and `source` is in it. Of LZ4: the pack.
    size_t tensor = 0;
  };
  void plan_slices();
  void plan_encoded_slices();
  bool is_packed() const { return plan_.is_encoded() && shard_.is_packed(); }
  // From what the slice's rank sends.
  void decode_slice(const at::Tensor& line, const PeerSlice& slice, const std::byte* sent) const;
  void copy_slice(const at::Tensor& line, const PeerSlice& slice) const;
  // The same by torch's threads: for the thread that computes.
  void copy_slice_by_all(const at::Tensor& line, const PeerSlice& slice) const;
  void pull(const at::Tensor& line);
  void wait_or_drop();

  std::optional<comm::PeerMemory> peers_;
  std::vector<PeerSlice> slices_;
  std::vector<EncodedBlock> blocks_;  // of all ranks, where parameters are encoded
  at::Tensor codes_;                  // of all ranks, gathered where ranks cannot read each other
  at::Tensor plain_;                  // this rank's, sent where what LZ4 packs cannot be read
  at::Tensor arriving_;               // where the line is gathered, if that is not where it is used
  at::Tensor copy_;                   // of the line, on the host
  bool copy_is_valid_ = false;
  comm::Work gathering_;
  CopyThread::Job pulling_;
};

}  // namespace lockstep::parallel::detail
