// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/gradients/backward_rounds.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep::parallel::detail {

using torch::autograd::variable_list;

// Hooks may outlive the listener.
class BackwardRounds::BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  BeforeHook(std::weak_ptr<Listener> listener, size_t index)
      : listener_(std::move(listener)), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto listener = listener_.lock(); listener && gradients[0].defined())
      listener->before_gradient(index_);
    return gradients;
  }

 private:
  std::weak_ptr<Listener> listener_;
  size_t index_;
};

class BackwardRounds::AfterHook final : public torch::autograd::FunctionPostHook {
 public:
  AfterHook(std::weak_ptr<Listener> listener, size_t index)
      : listener_(std::move(listener)), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list& gradients) override {
    if (const auto listener = listener_.lock())
      listener->on_gradient(index_, gradients.empty() || gradients[0].defined());
    return outputs;
  }
  std::shared_ptr<Listener> listener() const { return listener_.lock(); }

 private:
  std::weak_ptr<Listener> listener_;
  size_t index_;
};

BackwardRounds::~BackwardRounds() { remove_hooks(); }

void BackwardRounds::remove_hooks() {
  for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.after);
  hooks_.clear();
}

void BackwardRounds::listen(std::span<const at::Tensor> parameters,
                            std::weak_ptr<Listener> listener, bool before) {
  listener_ = std::move(listener);
  remove_hooks();
  for (size_t i = 0; i < parameters.size(); ++i) {
    // One that is frozen now has none, and may be trained later.
    const bool trained = parameters[i].requires_grad();
    if (!trained) parameters[i].set_requires_grad(true);
    Hook hook{.accumulator = torch::autograd::impl::grad_accumulator(parameters[i])};
    if (!trained) parameters[i].set_requires_grad(false);
    hook.after = hook.accumulator->add_post_hook(std::make_unique<AfterHook>(listener_, i));
    if (before) hook.accumulator->add_pre_hook(std::make_unique<BeforeHook>(listener_, i));
    hooks_.push_back(std::move(hook));
  }
}

std::vector<std::shared_ptr<BackwardRounds::Listener>> BackwardRounds::listeners_of(
    const at::Tensor& parameter) {
  std::vector<std::shared_ptr<Listener>> all;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return all;
  for (const auto& hook : accumulator->post_hooks()) {
    const auto* const own = dynamic_cast<const AfterHook*>(hook.get());
    if (own == nullptr) continue;
    if (auto listener = own->listener()) all.push_back(std::move(listener));
  }
  return all;
}

void BackwardRounds::begin_backward() {
  const auto listener = listener_.lock();
  if (open_ && end_.expired()) abandon(*listener);
  if (open_ || !listener->open_round(/*in_backward=*/true)) return;
  open_ = true;
  // Dies with the graph that was to call it.
  const auto end = std::make_shared<bool>();
  end_ = end;
  torch::autograd::Engine::get_default_engine().queue_callback([this, end, weak = listener_] {
    if (const auto owner = weak.lock()) {
      const std::lock_guard lock(mutex_);
      close(*owner);
    }
  });
}

void BackwardRounds::begin_repeated() {
  const auto listener = listener_.lock();
  if (open_) abandon(*listener);
  if (!listener->open_round(/*in_backward=*/true)) return;
  open_ = true;
  end_ = repeated_ = std::make_shared<bool>();
}

void BackwardRounds::end_repeated() {
  repeated_.reset();
  if (open_) close(*listener_.lock());
}

void BackwardRounds::run() {
  const auto listener = listener_.lock();
  if (open_) abandon(*listener);
  if (!listener->open_round(/*in_backward=*/false)) return;
  open_ = true;
  close(*listener);
}

bool BackwardRounds::is_between_rounds() {
  if (open_ && end_.expired()) abandon(*listener_.lock());
  return !open_;
}

void BackwardRounds::close(Listener& listener) {
  // Also after an exception: the next backward begins a new round.
  const std::unique_ptr<bool, void (*)(bool*)> end(&open_, [](bool* open) { *open = false; });
  const at::NoGradGuard no_grad;
  listener.close_round();
}

void BackwardRounds::abandon(Listener& listener) {
  listener.abandon_round();
  open_ = false;
}

}  // namespace lockstep::parallel::detail
