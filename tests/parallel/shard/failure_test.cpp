// SPDX-License-Identifier: Apache-2.0
// What goes wrong in a sharded model comes out where it is used, and what can go on does.
#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>

#include "lockstep/core/error.h"
#include "tests/parallel/shard/module_cases.h"
#include "tests/parallel/shard/pair.h"

namespace lockstep::test {
namespace {

using namespace std::chrono_literals;

const ModuleCase& linear() {
  static const ModuleCase found = module_cases().front();
  return found;
}

// ---- a peer that is gone ----

// Rank 1 leaves once the model is made; what rank 0 does then must not wait for ever.
void expect_comm_error(const std::string& backend,
                       const std::function<void(CaseModule&, parallel::ShardedModel&)>& use) {
  SCOPED_TRACE(backend);
  comm::run_threads(2,
                    [&](const comm::Group& group) {
                      const auto model = make_case_module(linear(), at::kCPU);
                      auto sharded = shard(*model, group, {"", shard_all()});
                      if (group.rank() == 1) return;
                      // Each time: values that nobody vouches for are never shown.
                      for (int i = 0; i < 3; ++i)
                        EXPECT_THROW(use(*model, sharded), CommError) << i;
                    },
                    {.backend = backend, .timeout = 500ms});
}

TEST(ShardFailure, AGatherWithoutItsPeerThrows) {
  for (const char* backend : {"thread", "shm", "gloo"}) {
    expect_comm_error(backend, [](CaseModule& model, parallel::ShardedModel&) {
      model.forward(numbers({4, 6}, 1));
    });
    expect_comm_error(backend,
                      [](CaseModule&, parallel::ShardedModel& sharded) { sharded.unshard(); });
  }
}

// The same for what is fetched before it is needed.
TEST(ShardFailure, AFetchWithoutItsPeerThrows) {
  comm::run_threads(2,
                    [&](const comm::Group& group) {
                      Pair pair(group, {"", shard_all()});
                      for (int step = 0; step < 2; ++step)
                        pair.step([&](Net& net) { return loss_of(net.forward(input_of(step))); });
                      pair.model->a(input_of(2));
                      if (group.rank() == 1) return;
                      for (int i = 0; i < 3; ++i) {
                        EXPECT_THROW(pair.model->forward(input_of(2)), CommError) << i;
                        EXPECT_THROW(pair.model->norm->weight.sum(), CommError) << i;
                      }
                    },
                    {.backend = "gloo", .timeout = 500ms});
}

// ---- a backward that fails ----

TEST(ShardFailure, ABackwardAfterOneThatThrew) {
  for (const char* backend : {"thread", "gloo"}) {
    for (const bool drops : {true, false}) {
      for (const char* broken : {"module.weight", "module.bias", "gain"}) {
        SCOPED_TRACE(broken);
        EXPECT_NO_THROW(comm::run_threads(
            2,
            [&](const comm::Group& group) {
              const auto plain = make_case_module(linear(), at::kCPU),
                         model = make_case_module(linear(), at::kCPU);
              auto sharded = shard(*model, group, {"", shard_all(), drops});
              auto plain_sgd = make_sgd(plain->parameters()), sgd = make_sgd(sharded.parameters());
              bool fails = false;
              const at::Tensor parameter = model->named_parameters()[broken];
              parameter.register_hook([&](const at::Tensor& gradient) {
                if (fails) throw std::runtime_error("a hook has a problem");
                return gradient;
              });
              for (int step = 0; step < 4; ++step) {
                const at::Tensor x = numbers({4, 6}, static_cast<uint64_t>(step));
                fails = step % 2 == 0;
                if (fails) {
                  EXPECT_THROW(loss_of(model->forward(x * 3)).backward(), std::runtime_error);
                  fails = false;
                  drop_gradients(sharded.parameters());
                }
                loss_of(plain->forward(x)).backward();
                loss_of(model->forward(x)).backward();
                require_same_gradients(sharded, *plain);
                plain_sgd.step();
                sgd.step();
                drop_gradients(plain->parameters());
                drop_gradients(sharded.parameters());
              }
              require_same_state(sharded, *plain);
            },
            {.backend = backend, .timeout = 20s}));
      }
    }
  }
}

// The model outlives what held its values.
TEST(ShardFailure, AModelWithoutItsShardsSaysSo) {
  comm::run_threads(2, [](const comm::Group& group) {
    const auto model = make_case_module(linear(), at::kCPU);
    { const auto sharded = shard(*model, group, {"", shard_all()}); }
    EXPECT_THROW(model->forward(numbers({4, 6}, 1)), Error);
  });
}

}  // namespace
}  // namespace lockstep::test
