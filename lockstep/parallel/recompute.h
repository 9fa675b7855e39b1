// Activations that are computed again instead of kept.
//
//   x = parallel::recompute([=] { return block(x); });
#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "lockstep/nn/random_context.h"

namespace lockstep::parallel {

struct RecomputeOptions {
  // What the random layers in the function share. It is set back to what it was in the first call
  // while the function is called again.
  std::shared_ptr<nn::RandomContext> random = {};
};

namespace detail {

// While it lives, what autograd would keep on this thread is only counted.
class RecomputeScope {
 public:
  RecomputeScope(std::function<void()> again, RecomputeOptions options);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  bool active_;
};

}  // namespace detail

// Calls the function and returns what it returns. Of what autograd would keep for backward nothing
// is kept but what the function itself holds: capture its inputs by value. When backward comes to
// it, the function is called once more, up to the last thing that it must give, with torch's random
// generators, autocast and the random context as they were. It must compute the same again.
// Backward is not re-entered, so hooks on gradients fire once, and gradients of inputs that need
// none are no special case. Without grad mode it is a plain call. Not for functions that are in
// turn differentiated twice.
template <class Function>
auto recompute(Function function, RecomputeOptions options = {}) {
  const detail::RecomputeScope scope([function]() mutable { static_cast<void>(function()); },
                                     std::move(options));
  return function();
}

}  // namespace lockstep::parallel
