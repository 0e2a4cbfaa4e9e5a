"""Timelines and metrics to HTML, figures and Chrome traces."""
