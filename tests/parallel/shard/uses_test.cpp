// SPDX-License-Identifier: Apache-2.0
// Uncommon ways to use a sharded model.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <memory>
#include <sstream>
#include <string>

#include "tests/parallel/shard/pair.h"

namespace lockstep::test {
namespace {

using at::Tensor;

// ---- without a backward ----

TEST(ShardUses, WithoutGradients) {
  for (const bool drops : {true, false}) {
    on_ranks([&](const comm::Group& group) {
      Pair pair(group, {"", shard_all(), drops});
      for (int step = 0; step < 3; ++step) {
        const Tensor x = input_of(step);
        {
          const at::NoGradGuard no_grad;
          require_same(pair.model->forward(x), pair.plain->forward(x), "no_grad");
        }
        {
          const c10::InferenceMode inference;
          require_same(pair.model->forward(x), pair.plain->forward(x), "inference mode");
        }
        pair.model->eval();
        require_same(pair.model->forward(x), pair.plain->forward(x), "eval");
        pair.step([&](Net& net) { return loss_of(net.forward(x)); });
      }
    });
  }
}

// Memory that is first needed in inference mode is written later without it.
TEST(ShardUses, InferenceModeFirst) {
  parallel::FullyShardOptions host = shard_all(), whole = shard_all(), wide = shard_all();
  host.advanced.keep_gathered_on_host = true;
  wide.mixed_precision.param = whole.mixed_precision.param = at::kDouble;
  whole.strategy = parallel::ShardingStrategy::optimizer;
  for (const auto& options : {host, whole, wide}) {
    on_ranks([&](const comm::Group& group) {
      Pair pair(group, {"", options});
      if (options.mixed_precision.param) pair.plain->to(at::kDouble);
      const auto dtype = pair.plain->scale.scalar_type();
      for (int step = 0; step < 3; ++step) {
        const Tensor x = input_of(step);
        if (step != 1) {
          const c10::InferenceMode inference;
          require_same(pair.model->forward(x), pair.plain->forward(x.to(dtype)), "inference mode");
        }
        const Tensor output = pair.model->forward(x);
        require_same(output, pair.plain->forward(x.to(dtype)), "output");
        loss_of(output).backward();
      }
    });
  }
}

TEST(ShardUses, PrintingAndCloning) {
  on_ranks([](const comm::Group& group) {
    Pair pair(group);
    const auto print = [](const Tensor& tensor) {
      std::ostringstream text;
      text << tensor;
      return text.str();
    };
    for (const char* name : {"a.weight", "norm.bias", "scale"}) {
      require(print(pair.model->named_parameters()[name]) ==
                  print(pair.plain->named_parameters()[name]),
              std::string("print of ") + name);
    }
    // A clone is an ordinary module.
    const auto clone = std::dynamic_pointer_cast<Net>(pair.model->clone());
    pair.step([](Net& net) { return loss_of(net.forward(input_of(0))); });
    const Net fresh;
    for (const auto& item : fresh.named_parameters())
      require_same(clone->named_parameters()[item.key()], item.value(), "clone's " + item.key());
    loss_of(clone->forward(input_of(1))).backward();
    require(clone->a->weight.grad().norm().item<double>() > 0, "the clone has no gradients");
    clone->a->weight.data().zero_();
    require_same_state(pair.sharded, *pair.plain);
  });
}

// What stays gathered over a step has the new values after it.
TEST(ShardUses, GatheredOverSteps) {
  for (const char* unit : {"", "b"}) {
    on_ranks([&](const comm::Group& group) {
      Pair pair(group, {"", shard_all()});
      pair.sharded.unshard(unit);
      for (int step = 0; step < 3; ++step)
        pair.step([&](Net& net) { return loss_of(net.forward(input_of(step))); });
      require(pair.sharded.state("b.weight") == parallel::ParameterState::gathered, "b is gone");
      pair.sharded.reshard(unit);
      pair.step([&](Net& net) { return loss_of(net.forward(input_of(3))); });
    });
  }
}

// ---- parameters that are not used ----

TEST(ShardUses, WhatIsNotUsedStaysAsItIs) {
  for (const bool orig : {false, true}) {
    on_ranks([&](const comm::Group& group) {
      parallel::FullyShardOptions options = shard_all();
      if (orig) options.units = parallel::OneUnit{};
      options.use_orig_params = orig;
      Pair pair(group, {"", options});
      const auto adamw = torch::optim::AdamWOptions(0.125).weight_decay(0.5);
      torch::optim::AdamW plain(pair.plain->parameters(), adamw);
      torch::optim::AdamW sharded(pair.sharded.parameters(), adamw);
      for (int step = 0; step < 3; ++step) {
        loss_of(pair.plain->forward(input_of(step))).backward();
        loss_of(pair.model->forward(input_of(step))).backward();
        require_same_gradients(pair.sharded, *pair.plain);
        plain.step();
        sharded.step();
        for (torch::optim::Optimizer* each : {static_cast<torch::optim::Optimizer*>(&plain),
                                              static_cast<torch::optim::Optimizer*>(&sharded)})
          each->zero_grad();
      }
      const Net fresh;
      for (const auto& [name, tensor] : pair.sharded.full_state_dict()) {
        const Tensor before = fresh.named_parameters()[name];
        const bool unused =
            name.starts_with("spare.") || name.starts_with("table.") || name == "order";
        require(at::equal(tensor, before) == unused,
                name + (unused ? " changed" : " did not change"));
      }
    });
  }
}

// ---- orders that change ----

Tensor branch(Net& net, const Tensor& x, bool first) {
  return first ? net.forward(x) : net.norm(net.scale * (x + net.table->weight.narrow(0, 0, 4)));
}

TEST(ShardUses, BranchesByStep) {
  for (const bool drops : {true, false}) {
    for (const int depth : {1, 3}) {
      on_ranks([&](const comm::Group& group) {
        parallel::FullyShardOptions options = shard_all();
        options.advanced.prefetch_depth = depth;
        Pair pair(group, {"", options, drops});
        for (int step = 0; step < 6; ++step)
          pair.step([&](Net& net) { return loss_of(branch(net, input_of(step), step % 3 != 1)); });
      });
    }
  }
}

// Peers need not help where one can look into their memory.
TEST(ShardUses, BranchesByRank) {
  for (const bool drops : {true, false}) {
    on_ranks([&](const comm::Group& group) {
      Pair pair(group, {"", shard_all(), drops});
      for (int step = 0; step < 4; ++step) {
        const bool mine = (group.rank() + step) % 2 == 0;
        const Tensor x = input_of(step);
        require_same(branch(*pair.model, x, mine), branch(*pair.plain, x, mine), "output");
        loss_of(branch(*pair.model, x, mine)).backward();
        // Both ranks' branches, half each.
        (loss_of(branch(*pair.plain, x, true)) * 0.5).backward();
        (loss_of(branch(*pair.plain, x, false)) * 0.5).backward();
        pair.update();
      }
      require_same_state(pair.sharded, *pair.plain);
    });
  }
}

TEST(ShardUses, OneRankReads) {
  for (const bool drops : {true, false}) {
    on_ranks([&](const comm::Group& group) {
      Pair pair(group, {"", shard_all(), drops});
      const auto read = [&](const char* when) {
        if (group.rank() != 0) return;
        for (const auto& item : pair.plain->named_parameters()) {
          if (!item.value().is_floating_point()) continue;
          require_same(pair.model->named_parameters()[item.key()].norm(), item.value().norm(),
                       std::string("norm ") + when + " of " + item.key());
        }
      };
      for (int step = 0; step < 3; ++step) {
        const Tensor x = input_of(step);
        read("before forward");
        const Tensor hidden = pair.model->a(x);
        read("in forward");
        const Tensor loss = loss_of(pair.model->b(hidden));
        loss_of(pair.plain->b(pair.plain->a(x))).backward();
        read("before backward");
        loss.backward();
        pair.update();
      }
      require_same_state(pair.sharded, *pair.plain);
    });
  }
}

// ---- several models ----

TEST(ShardUses, TwoModels) {
  for (const bool drops : {true, false}) {
    on_ranks([&](const comm::Group& group) {
      Pair one(group, {"", shard_all(), drops}), two(group, {"", shard_all(), drops});
      const auto both = [](Net& first, Net& second, const Tensor& x) {
        // Operators that take parameters of both, and of two units of each.
        const Tensor mixed = at::cat({first.a->weight, second.a->weight, first.table->weight,
                                      second.b->weight.t(), second.table->weight});
        return loss_of(second.forward(first.forward(x))) + loss_of(x.mm(mixed.t()));
      };
      for (int step = 0; step < 3; ++step) {
        const Tensor x = input_of(step);
        one.step([&](Net& net) { return loss_of(net.forward(x)); });
        two.step([&](Net& net) { return loss_of(net.forward(x.neg())); });
        const Tensor expected = both(*one.plain, *two.plain, x);
        const Tensor loss = both(*one.model, *two.model, x);
        require_same(loss, expected, "loss");
        expected.backward();
        loss.backward();
        one.update();
        two.update();
      }
      require_same_state(one.sharded, *one.plain);
      require_same_state(two.sharded, *two.plain);
    });
  }
}

}  // namespace
}  // namespace lockstep::test
