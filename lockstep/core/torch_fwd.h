// SPDX-License-Identifier: Apache-2.0
// The only forward declarations of torch's classes: headers that name a tensor by reference include
// this.
#pragma once

namespace at {
class Tensor;
}
namespace c10 {
struct Device;
}
namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}
