"""HTML reports and Plotly figures."""
