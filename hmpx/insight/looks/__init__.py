"""What is looked for in a run: one file for each `hmpx.insight.dispatch.Look`."""
