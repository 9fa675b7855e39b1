// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/recompute/saved_tensor_engine.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <atomic>
#include <mutex>
#include <utility>

namespace lockstep::parallel::detail {
namespace {

using torch::autograd::Engine;

class HookEngine final : public Engine {
 public:
  HookEngine(Engine& behind, HooksForSavedTensor hooks) : behind_(behind), hooks_(hooks) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return behind_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task,
      std::shared_ptr<torch::autograd::Node> root, torch::autograd::InputBuffer&& inputs) override {
    return behind_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return behind_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto ours = hooks_();
    return ours ? std::move(ours) : behind_.get_default_saved_variable_hooks();
  }

 private:
  Engine& behind_;
  HooksForSavedTensor hooks_;
};

// torch asks a function without a context which engine is the default one.
std::atomic<HookEngine*> front = nullptr;

}  // namespace

void install_saved_tensor_engine(HooksForSavedTensor hooks) {
  const auto is_ours = [] {
    Engine* const ours = front.load();
    return ours != nullptr && &Engine::get_default_engine() == ours;
  };
  if (is_ours()) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (is_ours()) return;
  // A new one each time: what was set since may have one of ours behind it. Never destroyed, like
  // torch's own: its threads may outlive everything.
  front = new HookEngine(Engine::get_default_engine(), hooks);
  torch::autograd::set_default_engine_stub([]() -> Engine& { return *front; });
}

}  // namespace lockstep::parallel::detail
