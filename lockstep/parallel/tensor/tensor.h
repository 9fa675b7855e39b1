// SPDX-License-Identifier: Apache-2.0
// Tensor parallelism: ranks share the matrices of a model, each has some rows or columns of them.
//
//   const parallel::TensorPlan plan{{"*.up", parallel::TensorStyle::column},
//                                   {"*.down", parallel::TensorStyle::row}};
//   auto shared = parallel::tensor_parallel(*model, mesh["tp"], plan);
//   ...
//   loss.backward();
//   shared.reduce_gradients();      // of norms, with sequence parallelism or between the two
//   shared.clip_grad_norm_(1);
//
// The model is built of lockstep::nn's Linear, Embedding and Dropout, and is called as before.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/core/torch_fwd.h"
#include "lockstep/layout/placement.h"
#include "lockstep/layout/tensor_plan.h"
#include "lockstep/nn/init_model.h"
#include "lockstep/optim/clip.h"
#include "lockstep/optim/parameters/parameters.h"

namespace lockstep::parallel {

using layout::TensorPlan;
using layout::TensorStyle;

struct TensorParallelOptions {
  // Between the matrices that ranks share, each has its part of the sequence, of the dimension
  // before the last: sums over ranks become sums to parts, and norms and dropouts, which the plan
  // names with style sequence, see the part alone.
  bool sequence_parallel = false;
  // Every rank gets its parts of rank 0's values. Off: of its own, or of none yet (deferred()).
  bool broadcast = true;
};

// What a group's ranks share, by the names of parameters. A value: copies share everything.
class TensorParallel {
 public:
  TensorParallel() : TensorParallel(comm::Group(), {}) {}  // all parameters are whole
  TensorParallel(comm::Group group, layout::TensorPlan plan, TensorParallelOptions options = {});

  // Leaves to this rank its part of the parameters of every module that the plan names. They stay
  // the same tensors, with another shape. May be called for several parts of one model. Collective
  // if options.broadcast. ConfigError, before anything is changed, where module, style and sizes do
  // not fit.
  void apply(torch::nn::Module& model);
  // Which of the plan's rules have named a module so far.
  const std::vector<bool>& used() const;

  // After backward: adds up the gradients of parameters that every rank has, but has used for its
  // part only: those of style partial, and with sequence parallelism all that are whole. One
  // all-reduce. What is summed already stays as it is: a second call does nothing, and gradients
  // may be added up over several backwards with a call after each, after some, or after the last.
  // Until then a rank's gradient is that of its part times the number of ranks; backward must have
  // made it. The gradients of other whole parameters are the same on all ranks. (Between column
  // and row ranks have other values each: whole parameters there need style partial.) Collective.
  void reduce_gradients() const;
  // The same for parameters that were sharded since, by the same names.
  void reduce_gradients(std::span<const optim::NamedParameter> parameters) const;

  // Of all ranks' parameters, each element once. Collective.
  double grad_norm(optim::NormOptions options = {}) const;
  double clip_grad_norm_(double max_norm, optim::NormOptions options = {}) const;
  // Those that this rank is to add to a norm: what all ranks have, rank 0 counts.
  std::vector<optim::NamedParameter> counted(std::vector<optim::NamedParameter> parameters) const;

  // For the optimizer: the parameters, which may have been sharded since, with the places of their
  // elements in the whole ones.
  std::vector<optim::NamedParameter> placed(std::vector<optim::NamedParameter> parameters) const;

  // How this rank's part of a parameter lies in the whole one; whole for names that no rule shares.
  layout::TensorSplit split(const std::string& parameter, const layout::Shape& local) const;
  // An initializer that asks another one, for parts of the whole parameters.
  nn::InitializeRule for_parts(nn::InitializeRule rule) const;

  const comm::Group& group() const;
  const TensorParallelOptions& options() const;

 private:
  void add_pieces(const optim::PlacedPart& part, std::vector<optim::PlacedPart>& all) const;

  struct State;
  std::shared_ptr<State> state_;
};

// Shards the model, given as *model or as its holder, over the ranks of the group. Collective.
// ConfigError also for a rule that names no module.
TensorParallel tensor_parallel(torch::nn::Module& model, const comm::Group& group,
                               const layout::TensorPlan& plan, TensorParallelOptions options = {});
template <class T>
TensorParallel tensor_parallel(const torch::nn::ModuleHolder<T>& model, const comm::Group& group,
                               const layout::TensorPlan& plan, TensorParallelOptions options = {}) {
  return tensor_parallel(*model.ptr(), group, plan, options);
}

}  // namespace lockstep::parallel
