// From a checkpoint's rows to panels (layout.h): the stored bits, moved but never rounded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels.h"

namespace eyas {

std::optional<Format> format_from_name(const std::string& name);

// Bytes of a row of `num_inputs` values as stored in GGUF (or plain floats), and of a panel.
int64_t row_bytes(Format format, int64_t num_inputs);
int64_t panel_bytes(Format format, int64_t num_inputs);
// Inputs come in multiples of this.
int block_inputs(Format format);

// Packs up to TILE rows into one panel; columns that have no row become zeros. False if a value is not
// finite.
bool pack_panel(Format format, int64_t num_inputs, const uint8_t* const* rows, int num_rows,
                uint8_t* panel);

}  // namespace eyas
