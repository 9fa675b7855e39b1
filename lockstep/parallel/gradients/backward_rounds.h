// SPDX-License-Identifier: Apache-2.0
// When the gradients of some parameters come, and when all that a backward has have come.
//
// A round is one backward pass, from its first gradient (or earlier) to its end. It may also be run
// outside backward, over the gradients that there are. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace lockstep::parallel::detail {

class BackwardRounds {
 public:
  // Called with the mutex held, unless it says otherwise.
  class Listener {
   public:
    virtual ~Listener() = default;
    // A gradient is about to be accumulated. Without the mutex.
    virtual void before_gradient(size_t /*parameter*/) {}
    // One was; or autograd had none to add: grad() is as it was, or a product has added to it
    // (nn::Linear::adds_gradient). Without the mutex.
    virtual void on_gradient(size_t parameter, bool is_new) = 0;
    // False: there is to be none.
    virtual bool open_round(bool in_backward) = 0;
    virtual void close_round() = 0;
    // A backward that threw never reached its end.
    virtual void abandon_round() = 0;
  };

  BackwardRounds() = default;
  ~BackwardRounds();
  BackwardRounds(const BackwardRounds&) = delete;
  BackwardRounds& operator=(const BackwardRounds&) = delete;

  // The listener owns this. Without `before`, before_gradient() is not called. Again where the
  // parameters were moved to another device, which takes autograd's hooks away.
  void listen(std::span<const at::Tensor> parameters, std::weak_ptr<Listener> listener,
              bool before = false);
  // Who listens to the parameter's gradients.
  static std::vector<std::shared_ptr<Listener>> listeners_of(const at::Tensor& parameter);

  // Gradients of different devices arrive on different threads. Recursive: what a round calls (a
  // user's hook) may ask about the round.
  std::recursive_mutex& mutex() { return mutex_; }
  // With the mutex held, in backward: opens a round if none is open; its end is queued on the graph
  // that runs now. One whose backward has failed is abandoned first.
  void begin_backward();
  // With the mutex held: the same for gradients that come again without autograd, which
  // end_repeated() ends.
  void begin_repeated();
  void end_repeated();
  // With the mutex held: a round outside backward. One that is open has failed.
  void run();
  // With the mutex held.
  bool is_open() const { return open_; }
  // With the mutex held: no round is open. One whose backward has failed is abandoned first.
  bool is_between_rounds();

 private:
  class BeforeHook;
  class AfterHook;
  struct Hook {
    std::shared_ptr<torch::autograd::Node> accumulator;  // the tensor itself holds it weakly
    uintptr_t after = 0;
  };
  void remove_hooks();
  void close(Listener& listener);
  void abandon(Listener& listener);

  std::weak_ptr<Listener> listener_;
  std::vector<Hook> hooks_;
  std::recursive_mutex mutex_;
  bool open_ = false;
  std::shared_ptr<bool> repeated_;
  std::weak_ptr<bool> end_;  // gone, if the backward of the round was ended by an exception
};

}  // namespace lockstep::parallel::detail
