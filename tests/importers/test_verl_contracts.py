"""The contracts of verl's columns: a graph of them has no findings, and costs what its arrays hold."""

from pathlib import Path

import flowgraph

GRAPH = Path(__file__).with_name("verl_grpo.yaml")
ROWS, PROMPT, RESPONSE = 1024 * 5, 512, 1024


def test_a_graph_of_described_hops_has_no_findings_with_and_without_passes() -> None:
    assert flowgraph.load(GRAPH).diagnostics == []
    assert flowgraph.load(GRAPH, no_pass=["all"]).diagnostics == []


def test_columns_cost_rows_times_length_times_the_width_of_their_dtype() -> None:
    audit = flowgraph.audit(GRAPH, no_pass=["all"])
    got = {
        field.column: field.max
        for seam in audit.seams
        if seam.reader == "update_actor"
        for field in seam.fields
    }
    assert got["input_ids"] == ROWS * (PROMPT + RESPONSE) * 8 == 62_914_560
    assert got["prompts"] == ROWS * PROMPT * 8
    assert got["response_mask"] == ROWS * RESPONSE * 8
    assert got["rollout_log_probs"] == got["advantages"] == ROWS * RESPONSE * 4
