// SPDX-License-Identifier: Apache-2.0
#include "lockstep/optim/kernels/packed_update.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/float16.h"
#include "lockstep/optim/kernels/blocks.h"
#include "lockstep/optim/kernels/packed_kernels.h"

namespace lockstep::optim {
namespace {

using codec::Codec;
using codec::Sign;

// Decoded at a time: with the parameter and its gradient they fit a first-level cache.
constexpr int64_t kChunk = 2048;
static_assert(kChunk % codec::kBlock == 0 && detail::Blocks::kElements % kChunk == 0);

bool is_coded(const PackedFormat& format) { return format.weight != Codec::none; }

bool is_8_bits(Codec codec) { return codec == Codec::int8 || codec == Codec::quantization; }

detail::Tie tie_of(const PackedFormat& format) {
  if (master_of(format) != Master::remainder) return detail::Tie::none;
  return is_8_bits(format.exp_avg_sq) ? detail::Tie::round : detail::Tie::mark;
}

std::byte* at(void* data, DType dtype, int64_t element) {
  return static_cast<std::byte*>(data) + static_cast<size_t>(element) * size_of(dtype);
}

// One moment of a slice, as it is computed with, a chunk at a time.
class Moment {
 public:
  Moment(Codec codec, Sign sign, DType dtype, std::byte* encoded, int64_t elements)
      : codec_(codec), sign_(sign), dtype_(dtype), encoded_(encoded), elements_(elements) {}

  // In `scratch`, or where they are if they are kept so.
  void* decoded(int64_t begin, int64_t end, float* scratch) const {
    if (encoded_ == nullptr) return nullptr;
    if (codec_ == Codec::none) return at(encoded_, dtype_, begin);
    codec::decode(codec_, sign_, encoded_, scratch, {elements_, begin, end});
    return scratch;
  }
  // `values` are what decoded() gave or would give.
  void encode(int64_t begin, int64_t end, const void* values) const {
    if (encoded_ == nullptr || values == at(encoded_, dtype_, begin)) return;
    if (codec_ == Codec::none) {
      std::memcpy(at(encoded_, dtype_, begin), values,
                  static_cast<size_t>(end - begin) * size_of(dtype_));
    } else {
      codec::encode(codec_, sign_, static_cast<const float*>(values), encoded_,
                    {elements_, begin, end});
    }
  }

 private:
  Codec codec_;
  Sign sign_;
  DType dtype_;
  std::byte* encoded_;  // null: there is none
  int64_t elements_;
};

struct Parts {
  Parts(const PackedFormat& format, const PackedSlice& slice)
      : layout(packed_layout(format, slice.elements)),
        exp_avg(format.exp_avg, Sign::any, moment_dtype(format),
                format.moments > 0 ? slice.state + layout.exp_avg : nullptr, slice.elements),
        exp_avg_sq(format.exp_avg_sq, Sign::non_negative, moment_dtype(format),
                   format.moments > 1 ? slice.state + layout.exp_avg_sq : nullptr, slice.elements),
        master(slice.state + layout.remainder) {}

  uint16_t* remainder(int64_t element) const {
    return reinterpret_cast<uint16_t*>(master) + element;
  }
  float* whole(int64_t element) const { return reinterpret_cast<float*>(master) + element; }

  PackedLayout layout;
  Moment exp_avg, exp_avg_sq;
  std::byte* master;
};

// body(begin, end) for chunks of the slice, on torch's threads.
template <class Body>
void for_each_chunk(const PackedSlice& slice, const Body& body) {
  detail::Blocks blocks;
  blocks.add(slice.elements);
  blocks.for_each([&](const detail::Block& block) {
    for (int64_t begin = block.begin; begin < block.end; begin += kChunk) {
      body(begin, std::min(begin + kChunk, block.end));
    }
  });
}

template <class T>
double as_number(T value) {
  if constexpr (sizeof(T) == 2) {
    return widen(value);
  } else {
    return value;
  }
}

// Elements as float32, which parameters that are not float64 are computed in.
template <class T>
void widen_all(const void* from, float* to, int64_t count) {
  const T* values = static_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(as_number(values[i]));
}
void widen_all(DType dtype, const void* from, float* to, int64_t count) {
  switch (dtype) {
    case DType::float64:
      return widen_all<double>(from, to, count);
    case DType::float16:
      return widen_all<Half>(from, to, count);
    case DType::bfloat16:
      return widen_all<BFloat16>(from, to, count);
    default:
      return widen_all<float>(from, to, count);
  }
}

// What is updated: a whole master, unless someone else has written the parameter, which wins then.
template <class P>
void weights_of(const void* param, const float* master, float* weights, int64_t count) {
  const P* params = static_cast<const P*>(param);
  const auto bits = [](P value) { return std::bit_cast<uint16_t>(value); };
  for (int64_t i = 0; i < count; ++i) {
    const bool same = bits(narrow<P>(master[i])) == bits(params[i]);
    weights[i] = same ? master[i] : widen(params[i]);
  }
}

// A loop over the elements of a chunk. Operands::master is what the state has of it.
struct ChunkKernel {
  DType grad;  // the type that it takes
  std::function<void(const detail::Operands&, int64_t count)> run;
};

ChunkKernel kernel_of(const PackedFormat& format, const AdamWFactors& factors, DType grad) {
  check(format.moments == 2, "AdamW has two moments");
  if (format.param == DType::float32 || format.param == DType::bfloat16) {
    const auto kernel = detail::packed_kernels().adamw(format.param, grad, tie_of(format));
    if (kernel == nullptr) return {};
    return {grad, [=](const detail::Operands& all, int64_t count) {
              kernel({.param = all.param,
                      .grad = all.grad,
                      .remainder = static_cast<uint16_t*>(all.master),
                      .exp_avg = static_cast<float*>(all.first),
                      .exp_avg_sq = static_cast<float*>(all.second)},
                     factors, count);
            }};
  }
  const auto kernel = detail::kernels().adamw(format.param, grad);
  if (kernel == nullptr) return {};
  return {grad,
          [=](const detail::Operands& all, int64_t count) { kernel(all, factors, 0, count); }};
}

ChunkKernel kernel_of(const PackedFormat& format, const SgdUpdate& update, DType grad) {
  check(format.moments == (update.kind == detail::SgdKind::plain ? 0 : 1),
        "SGD has a moment where it has momentum");
  const auto kernel = detail::kernels().sgd(update.kind, format.param, grad);
  if (kernel == nullptr) return {};
  return {grad, [=, factors = update.factors](const detail::Operands& all, int64_t count) {
            kernel(all, factors, 0, count);
          }};
}

// For the gradient as it is, or else as float32.
ChunkKernel kernel_of(const PackedFormat& format, const PackedFactors& factors) {
  return std::visit(
      [&](const auto& rule) {
        ChunkKernel kernel = kernel_of(format, rule, format.grad);
        if (!kernel.run) kernel = kernel_of(format, rule, DType::float32);
        check(kernel.run != nullptr, "updates are for floating dtypes");
        return kernel;
      },
      factors);
}

}  // namespace

void packed_update(const PackedFormat& format, const PackedSlice& slice,
                   const PackedFactors& factors) {
  const ChunkKernel kernel = kernel_of(format, factors);
  const Parts parts(format, slice);
  const Master master = master_of(format);
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    alignas(64) float means[kChunk], squares[kChunk], weights[kChunk], grads[kChunk];
    const auto coded = is_coded(format) ? slice.weight.from(begin) : codec::CodedArray{};
    if (is_coded(format)) codec::join(coded, weights, end - begin);
    void* const exp_avg = parts.exp_avg.decoded(begin, end, means);
    void* const exp_avg_sq = parts.exp_avg_sq.decoded(begin, end, squares);
    const void* grad = at(const_cast<void*>(slice.grad), format.grad, begin);
    if (kernel.grad != format.grad) {
      widen_all(format.grad, grad, grads, end - begin);
      grad = grads;
    }
    kernel.run({.param = is_coded(format) ? static_cast<void*>(weights)
                                          : at(slice.param, format.param, begin),
                .grad = grad,
                .master = master == Master::none        ? nullptr
                          : master == Master::remainder ? static_cast<void*>(parts.remainder(begin))
                                                        : parts.whole(begin),
                .first = exp_avg,
                .second = exp_avg_sq},
               end - begin);
    parts.exp_avg.encode(begin, end, exp_avg);
    parts.exp_avg_sq.encode(begin, end, exp_avg_sq);
    if (is_coded(format)) codec::split(weights, coded, end - begin);
  });
}

void unpack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state) {
  const Parts parts(format, slice);
  const Master master = master_of(format);
  const DType dtype = moment_dtype(format);
  const bool marks = tie_of(format) == detail::Tie::mark;
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    float scratch[kChunk];
    const auto copy = [&](const void* values, void* to) {
      if (values == nullptr || to == nullptr) return;
      std::memcpy(at(to, dtype, begin), values, static_cast<size_t>(count) * size_of(dtype));
    };
    if (state.exp_avg != nullptr) copy(parts.exp_avg.decoded(begin, end, scratch), state.exp_avg);
    auto* const squares = static_cast<float*>(parts.exp_avg_sq.decoded(begin, end, scratch));
    copy(squares, state.exp_avg_sq);
    if (marks && state.exp_avg_sq != nullptr) {
      float* const shown = static_cast<float*>(state.exp_avg_sq);
      for (int64_t i = begin; i < end; ++i) shown[i] = std::fabs(shown[i]);
    }
    if (state.master == nullptr) return;
    float* const shown = static_cast<float*>(state.master) + begin;
    const void* const param = at(slice.param, format.param, begin);
    if (is_coded(format)) codec::join(slice.weight.from(begin), shown, count);
    if (master == Master::remainder) {
      detail::packed_kernels().join(param, parts.remainder(begin), marks ? squares : nullptr, shown,
                                    count);
    }
    if (master == Master::whole && format.param == DType::float16)
      weights_of<Half>(param, parts.whole(begin), shown, count);
    if (master == Master::whole && format.param == DType::bfloat16)
      weights_of<BFloat16>(param, parts.whole(begin), shown, count);
  });
}

void pack(const PackedFormat& format, const PackedSlice& slice, const UnpackedState& state) {
  const Parts parts(format, slice);
  const Master master = master_of(format);
  const DType dtype = moment_dtype(format);
  const bool marks = tie_of(format) == detail::Tie::mark;
  for_each_chunk(slice, [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    alignas(double) std::byte values[kChunk * sizeof(double)];
    const auto take = [&](const void* from) {
      const size_t bytes = static_cast<size_t>(count) * size_of(dtype);
      if (from == nullptr) {
        std::memset(values, 0, bytes);
      } else {
        std::memcpy(values, at(const_cast<void*>(from), dtype, begin), bytes);
      }
    };
    take(state.exp_avg);
    parts.exp_avg.encode(begin, end, values);
    take(state.exp_avg_sq);
    void* const param = at(slice.param, format.param, begin);
    if (master != Master::none) {
      float whole[kChunk];
      if (state.master != nullptr) {
        std::copy_n(static_cast<const float*>(state.master) + begin, count, whole);
      } else {
        widen_all(format.param, param, whole, count);
      }
      if (master == Master::whole) std::copy_n(whole, count, parts.whole(begin));
      if (master == Master::remainder) {
        detail::packed_kernels().split(whole, param, parts.remainder(begin),
                                       marks ? reinterpret_cast<float*>(values) : nullptr, count);
      }
    }
    parts.exp_avg_sq.encode(begin, end, values);
    if (state.master != nullptr && is_coded(format))
      codec::split(static_cast<const float*>(state.master) + begin, slice.weight.from(begin),
                   count);
  });
}

}  // namespace lockstep::optim
