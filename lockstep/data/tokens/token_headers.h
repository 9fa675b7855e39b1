// SPDX-License-Identifier: Apache-2.0
// The fixed bytes of token files. Private: for token_file.cpp, which reads them, and
// token_file_writer.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lockstep::data {

// llm.c: int32 header[256] = {magic, version, tokens, 0...}, then the tokens.
inline constexpr size_t kLlmcHeaderBytes = 1024;
struct LlmcKind {
  int32_t magic, version;
  int64_t width;
};
inline constexpr LlmcKind kLlmc16{20240520, 1, 2}, kLlmc32{20240801, 7, 4};
inline constexpr int32_t kLlmcEvaluationMagic = 20240522;

// Megatron's .idx: magic, u64 version, u8 type, u64 sequences, u64 borders, then int32 lengths,
// int64 pointers into .bin and int64 document borders, all without padding.
inline constexpr char kMegatronMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
inline constexpr uint64_t kMegatronVersion = 1;
inline constexpr size_t kMegatronHeaderBytes = 34;
inline constexpr uint8_t kMegatronInt32 = 4, kMegatronUint16 = 8;

}  // namespace lockstep::data
