"""The paper's experiments: settings, figures, tables."""
