// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model/module_tapes.h"

#include <algorithm>
#include <utility>

namespace lockstep::config {
namespace {

constexpr int64_t kFloat = 4;  // statistics and losses have it whatever the weights' type
constexpr int64_t kAttentionBlock = 128;  // of nn::blockwise_causal_attention

Buffer dropout(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  if (sizes.dropout == 0) return x;
  tape.record({.gradient = sizes.stream()});  // the mask is drawn again
  return tape.take(sizes.stream());
}

// What a norm sees on this rank: rows, each of them `width` elements.
struct Rows {
  int64_t count, width;

  int64_t bytes(const LayerSizes& sizes) const { return count * width * sizes.element; }
};

// Saves x and statistics of each row.
Buffer fused_norm(Tape& tape, const LayerSizes& sizes, const Buffer& x, const Rows& rows) {
  const int64_t statistics = (sizes.llama ? 1 : 2) * rows.count * kFloat;
  tape.record({.saved = {x, tape.take(statistics)},
               .gradient = rows.bytes(sizes),
               .weights = (sizes.llama ? 1 : 2) * rows.width * sizes.element});
  return tape.take(rows.bytes(sizes));
}

// x / rms(x) * weight by operators. Saves x, the scale of each row and the scaled x; before
// libtorch 2 also the squares.
Buffer rms_norm(Tape& tape, const LayerSizes& sizes, const Buffer& x, const Rows& rows) {
  const int64_t bytes = rows.bytes(sizes);
  Buffer squares = tape.take(bytes);
  if (!sizes.kernels.mean_saves) squares.reset();
  const Buffer scale = tape.take(rows.count * kFloat);
  // Of x / rms: by way of the scale, of the mean, of the square with two more on its way.
  tape.record({.saved = {x, scale, squares}, .gradient = bytes, .extra = 4 * bytes});
  const Buffer scaled = tape.take(bytes);
  tape.record({.saved = {scaled},
               .gradient = bytes,
               .extra = bytes,  // products, before they are summed to the weight's
               .weights = rows.width * sizes.element});
  return tape.take(bytes);
}

Buffer norm(Tape& tape, const LayerSizes& sizes, const Buffer& x, const Rows& rows) {
  return sizes.llama && !sizes.kernels.cuda ? rms_norm(tape, sizes, x, rows)
                                            : fused_norm(tape, sizes, x, rows);
}

// Of the residual stream.
Buffer norm(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  return norm(tape, sizes, x, {sizes.tokens() / sizes.stream_shares, sizes.hidden});
}

struct Linear {
  int64_t in, out;  // features on this rank
  // Ranks that share the sequence of its input, which is gathered for the product; of its output,
  // which is summed and scattered.
  int64_t sharing_in = 1, sharing_out = 1;
  bool bias = false;
  bool float8 = false;
};

// Saves the codes of its input, a byte for each, turned around unless they are gathered. The CPU
// decodes them for a product.
Buffer float8_linear(Tape& tape, const LayerSizes& sizes, const Linear& shape) {
  constexpr int64_t kMultiple = 16;  // of tokens that are summed over
  const int64_t tokens = sizes.tokens(), in = tokens * shape.in, out = tokens * shape.out;
  const int64_t padded = (tokens + kMultiple - 1) / kMultiple * kMultiple;
  const int64_t matrix = shape.in * shape.out, decoded = sizes.kernels.cuda ? 0 : kFloat;
  const bool gathers = shape.sharing_in > 1;
  const int64_t bias = shape.bias ? shape.out : 0;
  Node node{.saved = {tape.take(gathers ? in / shape.sharing_in : padded * shape.in)},
            .gradient = in * sizes.element / shape.sharing_in,
            .extra = 2 * out + std::max(matrix + decoded * (out + matrix), decoded * (out + in)),
            .weights = (matrix + bias) * sizes.element};
  if (gathers) node.extra += (sizes.element + 2) * in;
  if (shape.sharing_out > 1) node.extra += out * sizes.element;
  const Buffer codes = tape.take(in);
  const Buffer values = tape.take(decoded * (in + matrix));
  // Autograd saves for a function of our own when it has returned: its product is kept with it.
  Buffer whole = tape.product(out * sizes.element);
  tape.record(std::move(node));
  return shape.sharing_out > 1 ? tape.take(out * sizes.element / shape.sharing_out) : whole;
}

// Saves its input (B, T, in).
Buffer linear(Tape& tape, const LayerSizes& sizes, const Buffer& x, const Linear& shape) {
  if (shape.float8) return float8_linear(tape, sizes, shape);
  const int64_t in = sizes.tokens() * shape.in * sizes.element;
  const int64_t out = sizes.tokens() * shape.out * sizes.element;
  const int64_t bias = shape.bias ? shape.out : 0;
  Node node{.saved = {x},
            .gradient = in / shape.sharing_in,
            .weights = (shape.in * shape.out + bias) * sizes.element};
  if (shape.sharing_in > 1) node.extra = 2 * in;  // the gathered input and the whole gradient
  if (shape.sharing_out > 1) node.extra = out;    // the gathered gradient of the output
  tape.record(std::move(node));
  const Buffer gathered = tape.take(shape.sharing_in > 1 ? in : 0);
  Buffer whole = tape.product(out);
  return shape.sharing_out > 1 ? tape.take(out / shape.sharing_out) : whole;
}

struct Heads {
  Buffer q, k, v;
  // (B, H, T, D) as it lies in memory: q and k, v.
  bool contiguous = false, contiguous_v = false;
};

// Norms of the heads of q and of k, which are views of qkv. While the gradients of one are
// computed, those of all three wait.
struct NormedHeads {
  Buffer q, k;
};
NormedHeads norm_heads(Tape& tape, const LayerSizes& sizes, const Buffer& qkv) {
  const auto norm_of = [&](int64_t heads) {
    tape.fork();
    Buffer out = norm(tape, sizes, qkv, {sizes.tokens() * heads, sizes.width});
    tape.join();
    return out;
  };
  Buffer q = norm_of(sizes.heads);
  return {std::move(q), norm_of(sizes.kv_heads)};
}

// Views of qkv; with rotary positions copies of all three, in 16 bits on the CPU of q and k. Saves
// only what norms of the heads do.
Heads split_heads(Tape& tape, const LayerSizes& sizes, const Buffer& qkv) {
  // Backward copies each gradient to the order of qkv, and puts the three side by side.
  tape.record({.gradient = sizes.qkv()});
  if (!sizes.llama) return {qkv, qkv, qkv};
  NormedHeads normed;
  if (sizes.qk_norm) normed = norm_heads(tape, sizes, qkv);
  if (sizes.kernels.cuda || sizes.element == kFloat) {
    Buffer joined = tape.take(sizes.qk_norm ? sizes.qkv() : 0);  // of the normed q and k, and v
    normed = {};
    if (sizes.qk_norm) tape.record({.gradient = sizes.qkv()});
    if (!sizes.kernels.cuda) {
      const Buffer q = tape.take(sizes.queries()), k = tape.take(sizes.keys());
      return {q, k, tape.take(sizes.keys()), true, true};
    }
    const Buffer turned = tape.take(sizes.qkv());
    return {turned, turned, turned};
  }
  const auto rotate = [&](int64_t bytes) {
    const Buffer products = tape.take(3 * bytes);  // four of half the size, and their two sums
    return tape.take(bytes);
  };
  tape.record({.gradient = sizes.qkv(), .extra = sizes.queries()});
  const Buffer q = rotate(sizes.queries()), k = rotate(sizes.keys());
  return {q, k, qkv, true};
}

// Saves q, k, v, the result and its logarithms (B, H, T). The result is (B, T, H, D) in memory.
Buffer fused_attention(Tape& tape, const LayerSizes& sizes, const Heads& heads) {
  Buffer out = tape.product(sizes.queries());
  const Buffer logarithms = tape.product(sizes.tokens() * sizes.heads * kFloat);
  tape.record({.saved = {heads.q, heads.k, heads.v, out, logarithms}, .gradient = sizes.qkv()});
  return out;
}

// Saves q, k, v. Probabilities of a block of positions are there at a time.
Buffer blockwise_attention(Tape& tape, const LayerSizes& sizes, const Heads& heads) {
  // Heads of several rows of a batch do not lie one behind the other in qkv: backward copies them,
  // unless they come from the disk, where each tensor is by itself.
  const bool copies = sizes.batch > 1 && !sizes.stores_all();
  const int64_t values = copies && !heads.contiguous_v ? sizes.keys() : 0;
  const int64_t queries_and_keys = copies && !heads.contiguous ? sizes.queries() + sizes.keys() : 0;
  const int64_t gradient = copies ? sizes.queries() : 0;
  const int64_t block = std::min(kAttentionBlock, sizes.length);
  const int64_t window = sizes.windowed() ? sizes.window : sizes.length;
  int64_t most = 0;  // scores of a block and a head
  for (int64_t begin = 0; begin < sizes.length; begin += block) {
    const int64_t end = std::min(begin + block, sizes.length);
    const int64_t first = std::max<int64_t>(begin - window + 1, 0);
    most = std::max(most, (end - begin) * (end - first));
  }
  const int64_t rows = sizes.batch * sizes.heads * block;
  const int64_t part = rows * sizes.width * sizes.element;
  const int64_t gathered = sizes.heads > sizes.kv_heads ? part : 0;  // heads that share a key
  const int64_t probabilities = sizes.batch * sizes.heads * most * sizes.element;
  const int64_t copied = queries_and_keys + values;
  tape.record({.saved = {heads.q, heads.k, heads.v},
               .gradient = sizes.qkv(),
               .extra = copied + gradient + 2 * gathered + 2 * probabilities + part});
  Buffer out = tape.product(sizes.queries());
  tape.touch_for_product(copied + gathered + probabilities + part);
  return out;
}

Buffer attention(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  const int64_t inner = sizes.heads * sizes.width;
  const int64_t outer = (sizes.heads + 2 * sizes.kv_heads) * sizes.width;
  const Heads heads = split_heads(tape, sizes,
                                  linear(tape, sizes, x,
                                         {.in = sizes.hidden,
                                          .out = outer,
                                          .sharing_in = sizes.stream_shares,
                                          .bias = sizes.qkv_bias,
                                          .float8 = sizes.float8.qkv}));
  const Linear out{.in = inner,
                   .out = sizes.hidden,
                   .sharing_out = sizes.stream_shares,
                   .bias = !sizes.llama,
                   .float8 = sizes.float8.out};
  if (sizes.kernels.fused_attention && !sizes.windowed())
    return linear(tape, sizes, fused_attention(tape, sizes, heads), out);
  const Buffer mixed = blockwise_attention(tape, sizes, heads);
  return linear(tape, sizes, tape.take(sizes.queries()), out);  // (B, H, T, D) -> (B, T, H * D)
}

// Saves the activation's input (B, T, F), or with a gate (B, T, 2 F), and its output (B, T, F).
Buffer mlp(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  const int64_t width = (sizes.llama ? 2 : 1) * sizes.ffn;
  const Buffer inner = linear(tape, sizes, x,
                              {.in = sizes.hidden,
                               .out = width,
                               .sharing_in = sizes.stream_shares,
                               .bias = !sizes.llama,
                               .float8 = sizes.float8.up});
  tape.record({.saved = {inner}, .gradient = sizes.tokens() * width * sizes.element});
  return linear(tape, sizes, tape.take(sizes.tokens() * sizes.ffn * sizes.element),
                {.in = sizes.ffn,
                 .out = sizes.hidden,
                 .sharing_out = sizes.stream_shares,
                 .bias = !sizes.llama,
                 .float8 = sizes.float8.down});
}

Buffer attention_path(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  const Buffer normed = norm(tape, sizes, x);
  return dropout(tape, sizes, attention(tape, sizes, normed));
}

// What a layer that computes some tokens at once, and again in backward, has for those.
Buffer in_tiles(Tape& tape, const LayerSizes& sizes, const Buffer& x,
                Buffer (*layer)(Tape& tape, const LayerSizes& sizes, const Buffer& x)) {
  LayerSizes part = sizes;
  part.length = sizes.tile * sizes.stream_shares;
  part.tile = 0;
  Buffer out = tape.recompute(x, [part, x, layer](Tape& inner) { return layer(inner, part, x); });
  tape.record({.gradient = sizes.stream()});  // of all parts
  return out;
}

Buffer normed_mlp(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  const Buffer normed = norm(tape, sizes, x);
  return mlp(tape, sizes, normed);
}

Buffer mlp_path(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  if (!sizes.has_tiles()) return dropout(tape, sizes, normed_mlp(tape, sizes, x));
  const Buffer parts = tape.take(sizes.stream()), part = in_tiles(tape, sizes, x, normed_mlp);
  return dropout(tape, sizes, tape.take(sizes.stream()));
}

Buffer run_block(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  const auto residual = [&](auto path) {
    tape.fork();
    const Buffer change = path();
    tape.join();
    return tape.take(sizes.stream());
  };
  const Buffer y = residual([&] { return attention_path(tape, sizes, x); });
  return residual([&] { return mlp_path(tape, sizes, y); });
}

}  // namespace

// Saves nothing but tokens.
Buffer embedding(Tape& tape, const LayerSizes& sizes) {
  const int64_t positions = sizes.llama ? 0 : sizes.positions * sizes.hidden * sizes.element;
  const int64_t table = sizes.vocab * sizes.hidden * sizes.element;
  tape.record({.weights = table + positions});
  Buffer x = tape.take(sizes.whole_stream());
  if (!sizes.llama) x = tape.take(sizes.whole_stream());
  if (sizes.stream_shares > 1) x = tape.take(sizes.stream());
  return dropout(tape, sizes, x);
}

Buffer block(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  if (sizes.recompute == layout::Recompute::none) return run_block(tape, sizes, x);
  const bool keeps_products = sizes.recompute == layout::Recompute::selective;
  if (!sizes.on_disk) {
    return tape.recompute(
        x, [&sizes, x](Tape& inner) { return run_block(inner, sizes, x); }, keeps_products);
  }
  return tape.recompute(
      {}, [&sizes](Tape& inner) { return run_block(inner, sizes, inner.take(sizes.stream())); },
      keeps_products);
}

Buffer head(Tape& tape, const LayerSizes& sizes, const Buffer& x) {
  if (sizes.has_tiles()) {
    in_tiles(tape, sizes, x, head);
    return tape.take(0);
  }
  const Buffer normed = norm(tape, sizes, x);
  const int64_t logits = sizes.tokens() * sizes.vocab * sizes.element;
  const int64_t losses = sizes.tokens() * sizes.vocab * kFloat;
  const int64_t whole = sizes.whole_stream();
  tape.record({.saved = {normed},
               .gradient = sizes.stream(),
               .extra = sizes.stream_shares > 1 ? 2 * whole : 0,
               .weights = sizes.vocab * sizes.hidden * sizes.element});
  const Buffer gathered = tape.take(sizes.stream_shares > 1 ? whole : 0);
  const Buffer out = tape.take(logits);
  if (sizes.kernels.cuda || sizes.tensor_parallel) {
    tape.record({.saved = {out}, .in_place = true});
    return tape.take(0);
  }
  // Saves log-probabilities (B, T, V) in float32; their gradient and that of the logits.
  const Buffer converted = tape.take(sizes.element == kFloat ? 0 : losses);
  tape.record({.saved = {tape.take(losses)}, .gradient = losses, .extra = losses});
  return tape.take(0);
}

}  // namespace lockstep::config
