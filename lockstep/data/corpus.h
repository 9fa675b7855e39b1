// SPDX-License-Identifier: Apache-2.0
// Training data as one long stream of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "lockstep/data/tokenizer/tokenizer.h"

namespace lockstep::data {

// What tells data from other data, whatever files it is in.
struct DataIdentity {
  int64_t tokens = 0;
  uint32_t crc = 0;      // CRC32C of all tokens, or, beyond 2^24, of 257 runs of 4096 of them
  int64_t modified = 0;  // of the file that was changed last, in seconds since 1970; not compared

  bool operator==(const DataIdentity& other) const {
    return tokens == other.tokens && crc == other.crc;
  }
  bool is_sampled() const { return tokens > int64_t{1} << 24; }
  std::string describe() const;  // "1000 tokens with checksum 0a1b2c3d"
};

// A value; copies share the data, which never changes. May be read by several threads. A file that
// shrinks while it lives is a DataError of what reads it.
class Corpus {
 public:
  // `path` as for find_data_files. Files are text or, where the name ends in .bin, token ids, which
  // the tokenizer does not touch; both together are a ConfigError. With the tokenizer `bytes` a
  // token is a byte of the file; any other encodes all text now, into memory, with its
  // end_of_text() between files.
  static Corpus open(const std::string& path, const Tokenizer& tokenizer);

  int64_t size() const { return end_ - begin_; }  // in tokens
  // Copies tokens [begin, begin + out.size()); throws ConfigError where they are not all there.
  void read(int64_t begin, std::span<int64_t> out) const;
  // The largest of the first `limit_tokens` tokens; -1 if there is none.
  int64_t max_token(int64_t limit_tokens) const;
  // Tokens [begin, end) of this one.
  Corpus slice(int64_t begin, int64_t end) const;
  // "1234 files, 12.3 MB of text, 12345678 tokens"
  std::string describe() const;
  // Reads all tokens, or some of many.
  DataIdentity identity() const;
  // Where a token is from: "shard_2.bin, token 17".
  std::string locate(int64_t position) const;

 private:
  struct Data;
  Corpus(std::shared_ptr<const Data> data, int64_t begin, int64_t end)
      : data_(std::move(data)), begin_(begin), end_(end) {}

  std::shared_ptr<const Data> data_;
  int64_t begin_, end_;
};

struct Split {
  Corpus train, validation;
};

// The last `fraction` of the tokens, rounded down, for validation. It must be in [0, 1).
Split hold_out(const Corpus& corpus, double fraction);

}  // namespace lockstep::data
