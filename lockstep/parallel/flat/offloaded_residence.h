// SPDX-License-Identifier: Apache-2.0
// Parameters of offloaded models: within budgets, and from host memory. Private: not installed.
#pragma once

#include "lockstep/parallel/flat/gathered_residence.h"

namespace lockstep::parallel::detail {

// Gathered or cast for each use, like GatheredResidence.
class OffloadedResidence : public GatheredResidence {
 public:
  using GatheredResidence::GatheredResidence;

 protected:
  at::Tensor line_memory(at::ScalarType dtype, c10::Device device) override;
  bool has_room() const override;
  void begin(bool beside_computation) override;
  void drop_line() override;
  OffloadTiers& tiers() const { return *plan_.offload->tiers; }

 private:
  size_t line_bytes() const;

  bool counted_ = false;  // in OffloadTiers::collective_lines
};

// This rank's alone and as the model sees them: copied from host memory by a queue.
class HostResidence : public OffloadedResidence {
 public:
  using OffloadedResidence::OffloadedResidence;

 protected:
  void begin(bool beside_computation) override;
  void wait() override;
  void finish() override {}
  // From the shard into line_.
  virtual void queue_copy(memory::Queue& fetch);

  memory::Event fetched_;
};

// This rank's alone, encoded there. The queue's thread decodes them into the line. On CUDA their
// codes are copied, and a kernel on a stream of its own decodes them when they are needed; what LZ4
// has packed is unpacked by the thread that computes.
class EncodedResidence final : public HostResidence {
 public:
  using HostResidence::HostResidence;

 protected:
  bool has_room() const override;
  void queue_copy(memory::Queue& fetch) override;
  void wait() override;

 private:
  bool decodes_there() const;

  at::Tensor codes_;  // on the device
};

}  // namespace lockstep::parallel::detail
