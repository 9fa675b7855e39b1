// SPDX-License-Identifier: Apache-2.0
#include "lockstep/nn/dropout.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/nn/autograd/capsule.h"
#include "lockstep/nn/context/context.h"
#include "lockstep/nn/random/random_cuda.h"
#include "lockstep/nn/random/random_kernels.h"
#include "lockstep/nn/random/random_runs.h"

namespace lockstep::nn {
namespace {

struct Mask {
  RandomKey key;
  Drop drop;
  Runs runs;
};

void check_p(double p) {
  if (!(p >= 0 && p < 1)) throw ConfigError(format("[dropout] p is {}, must be in [0, 1)", p));
}

Drop drop_of(double p) {
  return {.threshold = static_cast<uint32_t>(std::ldexp(p, 32)), .scale = 1 / (1 - p)};
}

template <class T>
void apply_to_memory(const Mask& mask, const T* in, T* out) {
  const CpuKernels& kernels = cpu_kernels();
  for_pieces(mask.runs, [&](int64_t place, uint64_t index, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      kernels.drop_float(mask.key, index, count, mask.drop, in + place, out + place);
    } else if constexpr (std::is_same_v<T, double>) {
      kernels.drop_double(mask.key, index, count, mask.drop, in + place, out + place);
    } else {
      float values[kPiece] = {};
      for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(in[place + i]);
      kernels.drop_float(mask.key, index, count, mask.drop, values, values);
      for (int64_t i = 0; i < count; ++i) out[place + i] = static_cast<T>(values[i]);
    }
  });
}

at::Tensor apply_mask(const Mask& mask, const at::Tensor& input) {
  const bool has_kernels = input.is_cpu() || (input.is_cuda() && cuda::is_available());
  if (!has_kernels && !input.is_meta()) return apply_mask(mask, input.cpu()).to(input.device());
  const at::Tensor in = input.contiguous();
  at::Tensor out = at::empty_like(in);
  if (in.numel() == 0 || in.is_meta()) return out;
  if (in.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, in.scalar_type(), "dropout", [&] {
      apply_to_memory(mask, in.data_ptr<scalar_t>(), out.data_ptr<scalar_t>());
    });
  } else {
    cuda::drop(in, out, mask.key, mask.drop, mask.runs);
  }
  return out;
}

struct MaskFunction : torch::autograd::Function<MaskFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const Mask& mask) {
    save_value(*context, "mask", mask);
    return apply_mask(mask, input);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    return {apply(gradients[0], saved_value<Mask>(*context, "mask")), at::Tensor()};
  }
};

at::Tensor masked(const at::Tensor& input, double p, const RandomKey& key, const Runs& runs) {
  if (!input.is_floating_point()) {
    throw ConfigError(format("[dropout] dtype is {}, must be a floating one",
                             c10::toString(input.scalar_type())));
  }
  return MaskFunction::apply(input, Mask{key, drop_of(p), runs});
}

// The elements of a batch whose rows are those of a larger one.
Runs rows_of(const at::Tensor& input, const layout::Range& rows) {
  if (rows.begin < 0 || rows.empty() || input.numel() % rows.size() != 0) {
    throw ConfigError(
        format("[dropout] a tensor of {} cannot be rows {} to {} of a batch: they must not be "
               "negative nor none, and the {} elements must divide among them",
               layout::describe(input.sizes().vec()), rows.begin, rows.end, input.numel()));
  }
  return {.length = input.numel(), .first = rows.begin * (input.numel() / rows.size())};
}

}  // namespace

at::Tensor dropout(const at::Tensor& input, double p, const RandomKey& key,
                   const std::optional<Slice>& slice) {
  check_p(p);
  const Runs runs = runs_of(input.sizes().vec(), slice, "dropout");
  return p == 0 ? input : masked(input, p, key, runs);
}

DropoutImpl::DropoutImpl(double p, DropoutOptions options)
    : RandomLayer(std::move(options.name), std::move(options.context)), p_(p) {
  check_p(p);
}

at::Tensor DropoutImpl::forward(const at::Tensor& input) {
  if (!is_training() || p_ == 0) return input;
  const RandomKey key = this->key("dropout");
  const bool has_part = sharing && sharing->sequence_parallel;
  if (has_part || context->token_ranks > 1) return drop_tokens(input, key, has_part);
  if (!context->rows) return dropout(input, p_, key);
  return masked(input, p_, key, rows_of(input, *context->rows));
}

// Of rows whose tokens ranks share: in chunks, by context parallelism, and each rank's chunks in
// parts, by sequence parallelism.
at::Tensor DropoutImpl::drop_tokens(const at::Tensor& input, const RandomKey& key,
                                    bool has_part) const {
  if (input.dim() < 2) {
    throw ConfigError(format("[dropout] a tensor of {} has no tokens that ranks could share",
                             layout::describe(input.sizes().vec())));
  }
  const int64_t length = input.size(-2), parts = has_part ? sharing->group.size() : 1;
  const int64_t begin = has_part ? sharing->group.rank() * length : 0;
  const int ranks = context->token_ranks;
  if (ranks == 1) {
    return dropout(input, p_, key, slice_of(input, parts * length, {begin, begin + length}));
  }
  const int64_t chunk = parts * length / 2;
  const std::array<int64_t, 2> chunks = zig_zag_chunks(ranks, context->token_rank);
  std::vector<at::Tensor> dropped;
  for (const int64_t half : {0, 1}) {
    const layout::Range held =
        layout::Range{half * chunk, (half + 1) * chunk}.intersect({begin, begin + length});
    if (held.empty()) continue;
    const int64_t moved = (chunks[static_cast<size_t>(half)] - half) * chunk;
    const at::Tensor part = input.narrow(-2, held.begin - begin, held.size());
    dropped.push_back(dropout(
        part, p_, key, slice_of(part, 2 * ranks * chunk, {held.begin + moved, held.end + moved})));
  }
  return at::cat(dropped, -2);
}

// Of what all ranks that share the tokens have, and of the batch that the context's rows are of.
Slice DropoutImpl::slice_of(const at::Tensor& part, int64_t length,
                            const layout::Range& tokens) const {
  layout::Shape shape = part.sizes().vec();
  layout::Box box = layout::Box::whole(shape);
  const size_t sequence = shape.size() - 2;
  shape[sequence] = length;
  box.ranges[sequence] = tokens;
  if (context->rows) {
    if (shape.size() < 3 || context->rows->size() != shape[0]) {
      throw ConfigError(
          format("[dropout] a part of a sequence of {} cannot be rows {} to {} of a "
                 "batch: its first dimension must be these rows",
                 layout::describe(part.sizes().vec()), context->rows->begin, context->rows->end));
    }
    shape[0] = context->rows->end;
    box.ranges[0] = *context->rows;
  }
  return {std::move(shape), std::move(box)};
}

bool DropoutImpl::supports(layout::TensorStyle style) const {
  return style == layout::TensorStyle::sequence;
}

at::Tensor DropoutImpl::forward_slice(const at::Tensor& input, const Slice& slice) {
  if (!is_training() || p_ == 0) return input;
  return dropout(input, p_, key("dropout"), slice);
}

void DropoutImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::nn::Dropout(p=" << p_ << ", name=" << layer_name << ")";
}

}  // namespace lockstep::nn
