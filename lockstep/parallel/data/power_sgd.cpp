// SPDX-License-Identifier: Apache-2.0
// PowerSGD: a gradient matrix M is sent as two thin factors, M ~ P Q^T, found by one step of the
// power method from the last step's Q.
#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <memory>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/parallel/data/gradient_hook.h"

namespace lockstep::parallel::hooks {
namespace {

// Makes the columns orthonormal, the same way on all ranks. A column that depends on those before
// it becomes zero: scaled up, its rounding errors would count as a direction.
void orthonormalize(const at::Tensor& matrix) {
  for (int64_t i = 0; i < matrix.size(1); ++i) {
    const at::Tensor column = matrix.select(1, i);
    const at::Tensor length = column.norm();
    const at::Tensor earlier = matrix.narrow(1, 0, i);
    for (int pass = 0; pass < 2; ++pass) column.sub_(earlier.matmul(earlier.t().matmul(column)));
    const at::Tensor rest = column.norm();
    column.mul_(at::where(rest > 1e-5 * length, 1 / rest, at::zeros_like(rest)));
  }
}

class PowerSgd : public std::enable_shared_from_this<PowerSgd> {
 public:
  explicit PowerSgd(PowerSgdOptions options) : options_(options) {}

  std::function<void()> reduce(GradientBucket& bucket, const comm::Group& group) {
    if (bucket.index == 0) ++step_;
    if (step_ <= options_.start_step) {
      return [work = comm::all_reduce(bucket.flat, group, average("plain", bucket))]() mutable {
        work.wait();
      };
    }
    auto task = std::make_shared<Task>();
    std::vector<at::Tensor> plain;
    for (size_t i = 0; i < bucket.gradients.size(); ++i) {
      const at::Tensor& gradient = bucket.gradients[i];
      if (!worthwhile(gradient)) {
        plain.push_back(gradient);
        continue;
      }
      State& state = states_[bucket.names[i]];
      Matrix matrix;
      matrix.state = &state;
      matrix.gradient = gradient;
      // (rows, columns) in float32: the gradient and what was left out before.
      matrix.whole = gradient.reshape({gradient.size(0), -1}).to(at::kFloat);
      if (matrix.whole.data_ptr() == gradient.data_ptr()) matrix.whole = matrix.whole.clone();
      if (state.error.defined()) matrix.whole.add_(state.error);
      const at::Tensor fresh = random_factor(bucket.names[i], matrix.whole);
      // A direction that was lost is searched for again.
      state.q = state.q.defined() && options_.warm_start
                    ? at::where(state.q.norm(2, 0, /*keepdim=*/true) > 0, state.q, fresh)
                    : fresh;
      orthonormalize(state.q);
      matrix.p = matrix.whole.matmul(state.q);
      task->matrices.push_back(std::move(matrix));
    }
    task->plain = plain;
    task->plain_flat = pack(plain);
    task->p_flat = pack(task->all(&Matrix::p));
    if (task->plain_flat.defined())
      task->plain_work = comm::all_reduce(task->plain_flat, group, average("plain", bucket));
    if (task->p_flat.defined())
      task->p_work = comm::all_reduce(task->p_flat, group, average("first factors", bucket));
    return [self = shared_from_this(), task, group, options = average("second factors", bucket)] {
      self->complete(*task, group, options);
    };
  }

 private:
  struct State {
    at::Tensor q, error;
  };
  struct Matrix {
    State* state = nullptr;
    at::Tensor gradient, whole, p;
    at::Tensor q;
  };
  struct Task {
    std::vector<Matrix> matrices;
    std::vector<at::Tensor> plain;
    at::Tensor plain_flat, p_flat;
    comm::Work plain_work, p_work;

    std::vector<at::Tensor> all(at::Tensor Matrix::*member) const {
      std::vector<at::Tensor> tensors;
      for (const Matrix& matrix : matrices) tensors.push_back(matrix.*member);
      return tensors;
    }
  };

  static comm::ReduceOptions average(const char* what, const GradientBucket& bucket) {
    return {.op = comm::ReduceOp::avg, .tag = format("gradient bucket {} {}", bucket.index, what)};
  }
  bool worthwhile(const at::Tensor& gradient) const {
    if (gradient.dim() < 2) return false;
    const double rows = static_cast<double>(gradient.size(0));
    const double columns = static_cast<double>(gradient.numel()) / rows;
    return (rows + columns) * options_.rank * options_.min_compression < rows * columns;
  }
  // The same on all ranks, and not from torch's generator, whose numbers belong to the user.
  at::Tensor random_factor(const std::string& name, const at::Tensor& matrix) const {
    uint64_t seed = options_.seed + static_cast<uint64_t>(step_) * 0x9e3779b97f4a7c15;
    for (const char c : name) seed = (seed ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const int64_t rank = std::min({int64_t{options_.rank}, matrix.size(0), matrix.size(1)});
    return at::randn({matrix.size(1), rank}, at::detail::createCPUGenerator(seed), at::kFloat)
        .to(matrix.device());
  }
  static at::Tensor pack(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
    return flat.empty() ? at::Tensor() : at::cat(flat);
  }
  static void unpack(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }

  void complete(Task& task, const comm::Group& group, const comm::ReduceOptions& options) {
    task.p_work.wait();
    unpack(task.p_flat, task.all(&Matrix::p));
    for (Matrix& matrix : task.matrices) {
      orthonormalize(matrix.p);
      matrix.q = matrix.whole.t().matmul(matrix.p);
    }
    const at::Tensor q_flat = pack(task.all(&Matrix::q));
    comm::Work q_work;
    if (q_flat.defined()) q_work = comm::all_reduce(q_flat, group, options);
    task.plain_work.wait();
    unpack(task.plain_flat, task.plain);
    q_work.wait();
    unpack(q_flat, task.all(&Matrix::q));
    for (Matrix& matrix : task.matrices) {
      const at::Tensor approximation = matrix.p.matmul(matrix.q.t());
      matrix.gradient.copy_(approximation.view(matrix.gradient.sizes()));
      if (options_.error_feedback) {
        // A gradient that is not finite on some rank makes the factors so on all. Such a step is
        // skipped; kept as an error it would spoil all that follow.
        const at::Tensor finite = at::isfinite(matrix.q).all();
        const at::Tensor before =
            matrix.state->error.defined() ? matrix.state->error : at::zeros_like(matrix.whole);
        matrix.state->error = at::where(finite, matrix.whole.sub_(approximation), before);
      }
      matrix.state->q = matrix.q;
    }
  }

  PowerSgdOptions options_;
  int64_t step_ = 0;
  std::map<std::string, State> states_;  // by parameter: buckets change after the first step
};

}  // namespace

GradientHook power_sgd(PowerSgdOptions options) {
  if (options.rank < 1 || options.start_step < 0) {
    throw ConfigError(
        format("[power_sgd] rank is {} and start_step is {}, must be at least 1 and 0",
               options.rank, options.start_step));
  }
  return [state = std::make_shared<PowerSgd>(options)](GradientBucket& bucket,
                                                       const comm::Group& group) {
    return state->reduce(bucket, group);
  };
}

}  // namespace lockstep::parallel::hooks
