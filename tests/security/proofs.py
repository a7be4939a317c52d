"""Inputs that no single file shows: each names the test that shows what they get."""

from __future__ import annotations

from tests.security.rows import Proof

FILES, BIN, HUB, WRITE = (f"tests/checkpoint/test_{name}.py" for name in ("files", "bin_file", "hub", "write"))
HEADER, SOURCE, INDEX = (f"tests/checkpoint/test_{name}.py" for name in ("safetensors_file", "source", "index"))
VOCABULARY = "tests/checkpoint/test_gguf_vocabulary.py"
SAFE, DIFF = "tests/security/test_safe.py", "tests/comparing/test_digests.py"


def proof(of: str, what: str, told: str, test: str, *, code: int = 2) -> Proof:
    return Proof(of=of, what=what, told=told, code=code, test=test)


PROOFS = [
    proof(
        "safetensors",
        "a boolean stored as 7",
        "a boolean is stored as the byte 7",
        f"{HEADER}::test_bool_that_is_neither_0_nor_1_is_refused_when_it_is_read",
    ),
    proof(
        "safetensors",
        "a flipped bit in the data",
        "another digest: the format has no checksum of its own",
        f"{DIFF}::test_names_dtypes_shapes_and_each_bit_count",
        code=0,
    ),
    proof(
        "safetensors",
        "many tensors",
        "time grows linearly, steps counted",
        f"{HEADER}::test_a_header_of_many_tensors_is_read_in_linear_steps",
        code=0,
    ),
    proof(
        "safetensors",
        "a FIFO or a directory in the place of any file",
        "refused at once, in a process of its own",
        f"{FILES}::test_fifo_or_directory_in_place_of_a_file_is_refused_at_once",
    ),
    proof(
        "safetensors",
        "a link into the hub's own cache",
        "followed",
        f"{FILES}::test_links_within_the_directory_and_into_the_hub_cache_are_followed",
        code=0,
    ),
    proof(
        "index",
        "stray shards of an older save",
        "never looked for",
        f"{SOURCE}::test_stray_shards_are_not_read",
        code=0,
    ),
    proof("index", "two sets of weights", "are both here", f"{SOURCE}::test_two_sets_of_weights"),
    proof(
        "index",
        "a shard that is a link to outside",
        "outside the checkpoint",
        f"{INDEX}::test_shard_that_is_a_link_to_outside",
    ),
    proof(
        ".bin",
        "a flipped bit in the data",
        "the checksum of the record does not match its bytes",
        f"{BIN}::test_flipped_bit_of_a_tensor_is_seen_when_it_is_read",
    ),
    proof(
        ".bin",
        "a safetensors file of that name",
        "rename it to end in .safetensors",
        f"{BIN}::test_safetensors_file_named_bin_is_named",
    ),
    proof(
        ".bin",
        "a tiny view of a big storage",
        "the view alone is copied",
        f"{BIN}::test_tiny_view_of_a_big_storage_is_copied_alone",
        code=0,
    ),
    proof(
        ".bin",
        "a torch whose weights_only could be bypassed",
        "not installed with: torch>=2.6 is asked for",
        f"{SAFE}::test_an_older_torch_is_not_taken",
    ),
    proof(
        "config.json",
        "a terabyte of it",
        "at most 16777216 can be meant",
        "tests/checkpoint/test_config.py::test_huge_configuration_is_not_read",
    ),
    proof(
        "tables",
        "a pattern built to explode a backtracking matcher",
        "read in linear steps, counted",
        f"{SAFE}::test_no_pattern_makes_reading_explode",
        code=0,
    ),
    proof(
        "tables",
        "an import path with --trust",
        "imported: it was asked for",
        f"{SAFE}::test_an_import_path_of_the_users_is_honoured_with_trust_only",
        code=0,
    ),
    proof(
        "hub", "a redirect to another host", "no token goes along", f"{HUB}::test_no_token_goes_to_another_host", code=0
    ),
    proof(
        "hub",
        "a connection dropped once",
        "taken up again",
        f"{HUB}::test_connection_that_drops_half_way_is_taken_up_again",
        code=0,
    ),
    proof(
        "hub",
        "a revision that moves between two files",
        "one commit is read",
        f"{HUB}::test_revision_that_moves_between_two_files",
        code=0,
    ),
    proof(
        "hub",
        "an offline cache with half a snapshot",
        "the cache holds a part of it",
        f"{HUB}::test_half_a_snapshot_offline",
    ),
    proof(
        "hub", "not cached, offline", "nothing of it is in the cache", f"{HUB}::test_model_that_is_not_cached_offline"
    ),
    proof(
        "hub",
        "a server that ignores ranges",
        "left after the header",
        f"{HUB}::test_server_that_ignores_ranges_is_left_after_the_header",
        code=0,
    ),
    proof(
        "system",
        "disk full, or a failing call, at every step of writing",
        "writing failed, and nothing was left behind",
        f"{WRITE}::test_failure_at_any_step_leaves_what_was_there",
    ),
    proof(
        "system",
        "a disk without room",
        "bytes are needed and 10 are free",
        f"{WRITE}::test_disk_without_room_fails_before_anything_is_written",
    ),
    proof("system", "a read error", "reading failed: Input/output error", f"{FILES}::test_read_error"),
    proof("system", "no permission", "cannot be opened: Permission denied", f"{FILES}::test_unreadable_file"),
    proof(
        "system",
        "a destination that exists, is a file, a link, the source, or in the source",
        "is or lies inside the source",
        f"{WRITE}::test_destinations_that_are_refused",
    ),
    proof(
        "system",
        "a destination that is not a checkpoint",
        "holds files and no checkpoint",
        f"{WRITE}::test_only_a_checkpoint_is_ever_replaced",
    ),
    proof(
        "system",
        "kill -9 while writing",
        "nothing half made; the next one sweeps up",
        f"{WRITE}::test_killed_writer_leaves_nothing_half_made_and_the_next_sweeps_up",
    ),
    proof(
        "system",
        "another writer at work",
        "its temporary directory is respected",
        f"{WRITE}::test_sibling_of_a_writer_in_this_process_is_respected",
        code=0,
    ),
    proof(
        "system",
        "a clock going backwards",
        "the same bytes",
        f"{WRITE}::test_clock_going_backwards_changes_nothing",
        code=0,
    ),
    proof(
        "system",
        "a source that changed or was truncated after it was opened",
        "the file changed after it was opened",
        f"{SAFE}::test_a_source_that_changes_is_noticed_before_it_is_mapped",
    ),
    proof(
        "system",
        "a write whose times are set back, while the number of hard links changes",
        "gained or lost a hard link since, and may have been written to as well",
        "tests/converting/test_identity.py::test_a_write_that_is_hidden_by_a_change_of_links_is_seen",
    ),
    proof(
        "system",
        "SIGTERM or SIGHUP",
        "ended by SIGTERM: exit code 143, and nothing is left but an interrupted conversion",
        "tests/cli/test_process.py::test_a_command_that_is_told_to_end_removes_what_it_made",
        code=143,
    ),
    proof(
        "system",
        "inputs or a recording of a few bytes that are 400,000 rows, or hundreds of cases",
        "bytes of tensors beyond those that are stored",
        "tests/security/test_costs.py::test_inputs_that_a_model_makes_far_more_of_are_charged",
    ),
    proof(
        "hub",
        "many files, each of which comes slowly",
        "bytes of all files came in 60 seconds, and then it was left",
        "tests/checkpoint/test_hub_hostile.py::test_the_time_of_waiting_is_one_for_all_files",
    ),
    proof(
        "hub",
        "an answer that is cut short, no JSON or no HTTP",
        "gave a malformed answer",
        "tests/checkpoint/test_hub_hostile.py::test_an_answer_that_cannot_be_read",
    ),
    proof(
        "hub",
        "a range or a status that was not asked for",
        "is the fault of the hub, not of the file",
        "tests/checkpoint/test_hub_hostile.py::test_a_range_that_was_not_asked_for_is_the_fault_of_the_hub",
    ),
    proof(
        "hub",
        "other bytes than the announced SHA-256, of which only headers are read",
        "answered with bytes whose SHA-256 is",
        "tests/checkpoint/test_hub_hostile.py::test_a_file_of_other_bytes_than_announced_is_the_fault_of_the_hub",
    ),
    proof(
        "hub",
        "nothing but errors, or broken connections",
        "left after 3 tries more, in 10 seconds",
        "tests/checkpoint/test_hub_hostile.py::test_a_hub_that_only_fails_is_left_after_seconds",
    ),
    proof(
        "tables",
        "a formula of few characters that makes far more numbers than it reads",
        "refused before it is computed, with what it would hold",
        "tests/converting/test_formulas.py::test_a_formula_that_makes_far_more_than_it_reads_is_refused_in_a_line",
    ),
    proof(
        "tables",
        "many tensors of one shape, told apart by their names alone",
        "`suggest` makes their orders one at a time",
        "tests/suggesting/test_names.py::test_the_orders_of_many_tensors_of_one_shape_are_not_all_held",
        code=0,
    ),
    proof(
        "your module",
        "code that keeps state, writes files, or has a `while`, where a line is changed to find a mistake",
        "never run with a change",
        "tests/causes/test_line_edits.py::test_code_that_a_change_could_turn_into_harm_is_not",
        code=1,
    ),
    proof(
        "your module",
        "a loop or a tensor that a changed line makes huge",
        "that pass is ended, and the change is not offered",
        "tests/causes/test_line_edits.py::test_a_changed_pass_that_goes_on_and_on_or_makes_huge_tensors_is_ended",
        code=1,
    ),
    proof(
        "gguf",
        "a tokenizer of millions of values, tokens, lines or pieces, where a GGUF file is written",
        "this takes more than 4000000 values",
        f"{VOCABULARY}::test_what_the_files_of_a_tokenizer_hold_is_charged",
    ),
    proof(
        "gguf",
        "a config with a vocab_size of 10^9, where a GGUF file is written",
        "tokens are filled up to the rows of the embedding",
        f"{VOCABULARY}::test_tokens_are_filled_up_to_the_rows_of_the_embedding_whatever_the_config_says",
        code=0,
    ),
    proof(
        "gguf",
        "a tokenizer whose texts control the terminal where the package gguf logs them",
        "a warning, escaped",
        f"{VOCABULARY}::test_what_the_gguf_package_logs_is_a_warning_and_is_escaped",
        code=0,
    ),
    proof(
        "gguf",
        "a FIFO or a directory in the place of tokenizer.json",
        "a warning that names it; the vocabulary is not written",
        f"{VOCABULARY}::test_a_file_of_the_tokenizer_that_is_not_read_is_named",
        code=0,
    ),
    proof(
        "gguf",
        "a config with settings that make readers refuse the file that is written",
        "refused before anything is written",
        "tests/checkpoint/test_gguf.py::test_settings_that_no_reader_accepts_are_refused",
    ),
]
