// SPDX-License-Identifier: Apache-2.0
// Updates through a ring of every size have the bits of updates in place.
#include "lockstep/parallel/tiers/update_ring.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

using layout::Tier;
using layout::UpdateSite;

constexpr int64_t kSlice = 1024;
const optim::AdamWFactors kFactors{
    .decay = 0.99, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .step_size = 1e-2, .root_scale = 1};

// A tensor of the model, whose state and values rest on the host, and the same one in place.
struct Trained {
  Trained(int64_t count, const std::shared_ptr<OffloadTiers>& tiers)
      : values(at::randn({count})), gradient(at::randn({count})), plain(values.clone()) {
    StatePlan plan;
    for (int64_t begin = 0; begin < count; begin += kSlice)
      plan.slices.push_back({begin, std::min(kSlice, count - begin), Tier::host});
    state = std::make_unique<OffloadedState>(format("tensor of {}", count), plan, values,
                                             Tier::host, tiers);
    for (const StateSlice& slice : plan.slices)
      plain_state.emplace_back(optim::packed_layout(plan.format, slice.count).total);
  }
  void update_in_place() {
    for (size_t i = 0; i < plain_state.size(); ++i) {
      const StateSlice& slice = state->plan().slices[i];
      optim::packed_update(state->plan().format,
                           {.param = plain.data_ptr<float>() + slice.begin,
                            .grad = gradient.data_ptr<float>() + slice.begin,
                            .state = plain_state[i].data(),
                            .elements = slice.count},
                           kFactors);
    }
  }

  at::Tensor values, gradient, plain;
  std::unique_ptr<OffloadedState> state;
  std::vector<std::vector<std::byte>> plain_state;
};

std::shared_ptr<OffloadTiers> make_tiers(bool grads = false) {
  layout::OffloadOptions options{.grads = grads, .advanced = {.update_site = UpdateSite::device}};
  options.device_limit = options.param_budget = 8 << 20;
  options.advanced.host_limit = options.host_budget = 64 << 20;
  return std::make_shared<OffloadTiers>(options, at::kCPU, 0);
}

struct Updates {
  explicit Updates(double of_all, bool grads = false) : tiers(make_tiers(grads)) {
    const layout::OffloadOptions& options = tiers->options;
    layout::RingNeed need;
    // Some of many slices, some that are small, as norms are.
    for (const int64_t count : {5000, 7, 3 * 1024, 1, 2500, 64, 9000, 7, 1023}) {
      tensors.emplace_back(count, tiers);
      need += layout::ring_need(tensors.back().state->plan(), options);
    }
    const auto wanted = static_cast<int64_t>(of_all * static_cast<double>(need.all));
    ring = std::make_unique<UpdateRing>(tiers, UpdateSite::device,
                                        static_cast<size_t>(std::max(need.least(), wanted)));
  }
  ~Updates() { tiers->wait(); }

  void step(const std::vector<size_t>& order) {
    for (const size_t i : order) {
      Trained& tensor = tensors[i];
      last = ring->update(*tensor.state, {.gradient = tensor.gradient, .factors = kFactors});
      tensor.update_in_place();
    }
    ring->end_step();
  }
  void expect_same(const std::string& when) {
    last.written.wait();
    tiers->out->record().wait();
    for (Trained& tensor : tensors) {
      EXPECT_TRUE(tensor.values.equal(tensor.plain)) << when << ", " << tensor.state->name();
      for (size_t i = 0; i < tensor.plain_state.size(); ++i) {
        const auto& plain = tensor.plain_state[i];
        EXPECT_EQ(std::memcmp(tensor.state->slices()[i].memory.get(), plain.data(), plain.size()),
                  0)
            << when << ", " << tensor.state->name() << ", slice " << i;
      }
    }
  }

  std::shared_ptr<OffloadTiers> tiers;
  std::vector<Trained> tensors;
  std::unique_ptr<UpdateRing> ring;
  UpdateEvents last;
};

TEST(UpdateRing, HasTheBitsOfUpdatesInPlace) {
  const std::vector<size_t> forward{0, 1, 2, 3, 4, 5, 6, 7, 8}, backward{8, 7, 6, 5, 4, 3, 2, 1, 0};
  for (const double of_all : {0.0, 0.3, 0.55, 0.9, 1.0, 1.7}) {
    SCOPED_TRACE(of_all);
    Updates updates(of_all);
    for (int i = 0; i < 3; ++i) updates.step(forward);
    updates.expect_same("one order");
    updates.step(backward);  // what was fetched is of no use
    updates.step(backward);
    updates.step({0, 2, 4});  // part of it is
    updates.step(forward);
    updates.expect_same("another order");
    updates.ring->finish();
    updates.step(forward);
    updates.expect_same("after an interruption");
  }
}

// What others wrote while nothing was under way is what the next update starts with.
TEST(UpdateRing, FetchesAgainWhatMayHaveBeenWritten) {
  Updates updates(1);
  updates.step({0, 1, 2});
  updates.last.written.wait();
  updates.ring->finish();
  updates.tiers->in->record().wait();
  for (Trained& tensor : updates.tensors) {
    tensor.values.fill_(0.5);
    tensor.plain.fill_(0.5);
  }
  updates.step({0, 1, 2});
  updates.expect_same("after a write");
}

// Holds a queue up for as long as what it uses may go, and tells whether it went.
class Patience {
 public:
  void hold(memory::Queue& queue) {
    queue.run(
        [this] {
          std::unique_lock lock(mutex_);
          went_early_ =
              changed_.wait_for(lock, std::chrono::milliseconds{200}, [&] { return gone_; });
        },
        "");
  }
  void gone() {
    {
      const std::lock_guard lock(mutex_);
      gone_ = true;
    }
    changed_.notify_all();
  }
  bool went_early() const {
    const std::lock_guard lock(mutex_);
    return went_early_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool gone_ = false, went_early_ = false;
};

// A tensor that tells when its memory goes.
at::Tensor watched(int64_t count, Patience& patience) {
  auto memory = std::make_shared<std::vector<float>>(static_cast<size_t>(count), 1.0F);
  return at::from_blob(
      memory->data(), {count}, [memory, &patience](void*) { patience.gone(); }, at::kFloat);
}

TEST(UpdateRing, AFailedUpdateWaitsForCopiesOfTheGradient) {
  for (const bool from_host : {true, false}) {
    Updates updates(0, from_host);
    const StatePlan plan{.lossless = true,
                         .slices = {{0, kSlice, Tier::host}, {kSlice, kSlice, Tier::host}}};
    OffloadedState state("damaged", plan, at::zeros({2 * kSlice}), Tier::host, updates.tiers);
    state.slices()[1].packed.clear();
    Patience patience;
    patience.hold(from_host ? *updates.tiers->in : *updates.tiers->work);
    const auto update = [&] {
      // As a job of the driver, which has the only handle of a gradient that the model let go.
      const UpdateInput input{.gradient = watched(2 * kSlice, patience),
                              .gradient_on_host = from_host,
                              .factors = kFactors};
      updates.ring->update(state, input);
    };
    EXPECT_ANY_THROW(update());
    updates.tiers->wait();
    EXPECT_FALSE(patience.went_early()) << "from the host: " << from_host;
  }
}

TEST(UpdateRing, ItsMemoryOutlivesItWhileWorkUsesIt) {
  Updates updates(1);
  Patience patience;
  patience.hold(*updates.tiers->in);
  updates.ring->update(*updates.tensors[0].state,
                       {.gradient = updates.tensors[0].gradient, .factors = kFactors});
  updates.ring.reset();
  patience.gone();
  updates.tiers->wait();
  EXPECT_FALSE(patience.went_early());
}

TEST(OffloadTiers, RetiredMemoryOutlivesTheWorkThatUsesIt) {
  Patience patience;
  std::vector<float> target(4);
  {
    const auto made = make_tiers();
    OffloadTiers& tiers = *made;
    at::Tensor source = watched(4, patience);
    patience.hold(*tiers.send);
    tiers.to_host(*tiers.send, target.data(), source.data_ptr(), source.nbytes(), "source");
    // As gradients go: one queue copies, the driver, which has failed, would go on with it.
    tiers.driver->run([] { throw std::runtime_error("no luck"); }, "");
    tiers.driver->wait(tiers.send->record());
    const memory::Event moved = tiers.driver->record();
    tiers.retire(std::make_shared<at::Tensor>(std::exchange(source, {})), moved);
    for (int i = 0; i < 1000 && !moved.passed(); ++i) std::this_thread::yield();
    tiers.retire(nullptr, {});  // looks for what may go
  }
  EXPECT_FALSE(patience.went_early());
}

}  // namespace
}  // namespace lockstep::parallel::detail
